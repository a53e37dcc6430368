"""Converts patches to the form in which verl sends them to SGLang: a manifest, packed positions, packed values."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_ext.weight_sync.weight_patch import WeightPatch, refuse

_POSITION_BYTES = 4


def verl_flushes(patches: Iterable[WeightPatch]) -> list[dict[str, Tensor]]:
    """Returns patches as verl's loader for SGLang (`delta_loader.apply_delta`) takes them: one set of named tensors for
    each dtype.

    patches: patches of one version, from one rank or several, all on one device. Those without positions are left out.

    Each set has `__delta_spec__` (uint8: JSON with the encoding, a row for each patch and a checksum), `__positions__`
    (uint8: int32 positions, one patch after the other) and `__values__` (the values, in the patches' dtype). If nothing
    changed, the list is empty.

    Raises ValueError if a patch has a NaN, which the loader takes for "unchanged", or a parameter has 2**31 elements or
    more, since the loader's positions are int32. Send such a version with `WeightPublisher.full()`.
    """
    found = [patch for patch in patches if patch.indices.numel()]
    refuse(found)
    for patch in found:
        _refuse_inexpressible(patch)
    dtypes = dict.fromkeys(patch.values.dtype for patch in found)
    return [_flush([patch for patch in found if patch.values.dtype == dtype]) for dtype in dtypes]


def _refuse_inexpressible(patch: WeightPatch) -> None:
    if patch.numel >= 1 << 31:
        raise ValueError(f"{patch.name} has {patch.numel} elements; verl's positions are int32: at most 2**31 - 1")
    if bool(patch.values.isnan().any()):
        raise ValueError(
            f"{patch.name} has weights that are NaN, which verl's loader takes for unchanged; send this version whole"
        )


def _flush(patches: Sequence[WeightPatch]) -> dict[str, Tensor]:
    positions = torch.cat([patch.indices.to(torch.int32) for patch in patches]).view(torch.uint8)
    values = torch.cat([patch.values for patch in patches])
    spec = {"encoding": "indices", "params": _rows(patches), "checksum": _checksum(positions, values)}
    text = torch.frombuffer(bytearray(json.dumps(spec).encode()), dtype=torch.uint8)
    return {"__delta_spec__": text.to(values.device), "__positions__": positions, "__values__": values}


def _rows(patches: Sequence[WeightPatch]) -> list[dict[str, Any]]:
    rows, begin = [], 0
    for patch in patches:
        end = begin + patch.indices.numel()
        rows.append(
            {
                "name": patch.name,
                "dtype": str(patch.values.dtype).removeprefix("torch."),
                "shape": list(patch.full_shape),
                "pos_start": begin * _POSITION_BYTES,  # in bytes; values count elements
                "pos_end": end * _POSITION_BYTES,
                "pos_width": _POSITION_BYTES,
                "val_start": begin,
                "val_end": end,
            }
        )
        begin = end
    return rows


def _checksum(positions: Tensor, values: Tensor) -> int:
    """Returns verl's checksum: torch's hash of the positions, XORed with that of the values shifted left by a bit."""
    return int(torch.hash_tensor(positions).item()) ^ (int(torch.hash_tensor(values).item()) << 1)
