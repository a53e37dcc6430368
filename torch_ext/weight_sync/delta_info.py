"""What a delta says of itself."""

import ctypes
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from torch_ext.native import dtypes, library, structs
from torch_ext.weight_sync import delta_library
from torch_ext.weight_sync.delta_library import Bytes, DeltaParam
from torch_ext.weight_sync.weight_slice import name_and_shape


@structs.mirror("tx_delta_info")
class _Info(library.Struct):
    """What is in a message."""


class DeltaInfo(NamedTuple):
    """What `delta_info` returns.

    chain: the name of its chain of versions, which one publisher begins: 32 hexadecimal digits.
    model: a fingerprint of the names, dtypes and sizes of the model's parameters: 16 hexadecimal digits.
    version: that it brings weights to.
    first_version: the first one in it, where several are merged. It goes on top of the one before, or, full, begins.
    full: whether it begins with all weights, of first_version.
    part, parts: of the first part in it: which it is, and of how many, as many as the trainer has ranks.
    n_parts: in it: 1, unless parts are merged.
    changed: weights in it; of a block that goes whole all of them, changed or not.
    bytes: its size.
    params: shape and dtype of all parameters of the model, by name. Empty unless it is full or has version 1.
    """

    chain: str
    model: str
    version: int
    first_version: int
    full: bool
    part: int
    parts: int
    n_parts: int
    changed: int
    bytes: int
    params: Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def delta_info(delta: Bytes) -> DeltaInfo:
    """What is in a delta, without weights to apply it to: of which chain, versions and parts it is, and how much.

    delta: what `WeightPublisher.publish`, `full` and `merge_deltas` return: bytes-like, or a tensor of uint8.

    ValueError for what is no delta, is cut off or damaged. RuntimeError for a format that this torch_ext does not know,
    and for parts that do not belong together. Deltas are not authenticated: who can forge one can make it say
    anything.
    """
    info: Any = _Info(ctypes.sizeof(_Info))
    params: dict[str, Any] = {}
    with delta_library.messages([delta]) as (message,):
        delta_library.call("info_of", message, info)
        table: Any = (DeltaParam * info.n_params)()
        delta_library.call("params_of", message, len(table), table)
        for row in table:
            name, shape = name_and_shape(row.name.decode("utf-8", "backslashreplace"), row.numel)
            params[name] = (shape, dtypes.dtype_of(row.dtype))
        return DeltaInfo(
            chain="".join(f"{word:016x}" for word in info.id),
            model=f"{info.model:016x}",
            version=info.last_version,
            first_version=info.first_version,
            full=bool(info.kind),
            part=info.part,
            parts=info.parts,
            n_parts=info.n_parts,
            changed=info.changed,
            bytes=message.numel,
            params=params,
        )
