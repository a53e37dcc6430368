"""`delta_info`, which describes a delta."""

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
    """tx_delta_info."""


class DeltaInfo(NamedTuple):
    """Describes a delta; returned by `delta_info`.

    chain: the name of the publisher's chain of versions, 32 hexadecimal digits.
    model: a fingerprint of the names, dtypes and sizes of the model's parameters, 16 hexadecimal digits.
    version: the version of the weights after the delta is applied.
    first_version: the first version in the delta; less than `version` if several versions are merged. The delta applies
        to first_version - 1 unless it is full.
    full: whether it begins with all weights, of first_version.
    part, parts: the index of the first part in it, and the number of parts of a version (the trainer's ranks).
    n_parts: number of parts in it: 1 unless parts are merged.
    changed: number of weights in it. A block that is sent whole counts with all its weights, changed or not.
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
    """Describes a delta without applying it: its chain, versions, parts and size.

    delta: what `WeightPublisher.publish`, `full` or `merge_deltas` returned: bytes-like, or a tensor of uint8.

    Raises ValueError if it is no delta, truncated or damaged. Raises RuntimeError if this torch_ext does not know its
    format, or its parts do not belong together. Deltas are not authenticated: a forged delta can describe itself as
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
