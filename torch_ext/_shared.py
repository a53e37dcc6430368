"""Zeros for many tensors in few allocations: what lies in one memory goes to an operator as one tensor."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from torch_ext import _tensors

# Larger tensors get memory of their own, which is given back when they go; what handing over a tensor costs does not
# show beside stepping that many elements.
_MAX_NUMEL = 1 << 16
_ALIGNMENT = 64  # bytes; a cache line, so that no two tensors write to one


def zeros_like(wanted: Sequence[tuple[Tensor, torch.dtype]]) -> list[Tensor]:
    """Zeros of each tensor's shape and device, of its memory order where it is dense, in the dtype beside it.

    Small ones of one dtype and device share their memory: views, one after the other.
    """
    found: list[Tensor | None] = [None] * len(wanted)
    together: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i, (t, dtype) in enumerate(wanted):
        if t.numel() <= _MAX_NUMEL:
            together.setdefault((dtype, t.device), []).append(i)
        else:
            found[i] = _tensors.like(t, dtype)
    for (dtype, device), members in together.items():
        starts, total = _starts((wanted[i][0].numel() for i in members), _ALIGNMENT // dtype.itemsize)
        memory = torch.zeros(total, dtype=dtype, device=device)
        for i, start in zip(members, starts, strict=True):
            t = wanted[i][0]
            found[i] = memory.as_strided(t.shape, _strides(t), start)
    return [t for t in found if t is not None]


def _starts(numels: Iterable[int], alignment: int) -> tuple[list[int], int]:
    starts, end = [], 0
    for numel in numels:
        starts.append(end)
        end += -(-numel // alignment) * alignment
    return starts, end


def _strides(t: Tensor) -> tuple[int, ...]:
    if _tensors.is_dense(t):
        return t.stride()
    return torch.empty(t.shape, device="meta").stride()
