"""Zeros for many tensors in few allocations: what lies in one memory goes to an operator as one tensor."""

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from torch_ext import _tensors

# Larger tensors get memory of their own, which is given back when they go; what handing over a tensor costs does not
# show beside stepping that many elements.
_MAX_NUMEL = 1 << 16
_ALIGNMENT = 64  # bytes; a cache line, so that no two tensors write to one


as_plain: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunctionSubclass
"""Within it torch does not ask each SharingTensor whether it has operators of its own, which costs more than they."""


class SharingTensor(Tensor):
    """One of many that share their memory. Pickled (by torch.save, a queue of processes, Ray) it takes its own elements
    along and not the whole memory; what is copied together still shares one."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Files hold plain tensors."""
        return self.detach().clone().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = copied = copy.deepcopy(self.as_subclass(Tensor), memo).as_subclass(SharingTensor)
        return copied

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.as_subclass(Tensor))


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
            found[i] = memory.as_strided(t.shape, _strides(t), start).as_subclass(SharingTensor)
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
