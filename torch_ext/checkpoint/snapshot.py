"""Copies of a state in host memory that is allocated once and used again.

Of state tensors that are stored in another form what is stored is copied, so that a copy takes what the state takes.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_ext.optim.state import large_tensor
from torch_ext.optim.state.large_tensor import LargeTensor
from torch_ext.optim.state.sources import EncodedState, PlainState
from torch_ext.optim.state.state_tensor import StateTensor
from torch_ext.params import local_shard
from torch_ext.tensors import dense, host_copies


class Buffers:
    """Memory of one copy."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []
        self._used = 0
        self._copies: dict[Any, Tensor] = {}  # by the memory that they are of
        self._found: dict[int, Tensor] = {}  # the same by the ids of the tensors, which is quicker
        self._originals: list[Tensor] = []  # so that no other gets the id or the address of one before it is copied
        self._fresh: list[tuple[Tensor, Tensor]] = []  # to be copied: into memory that was allocated just now
        self._pairs: list[tuple[Tensor, Tensor]] = []  # and into other memory

    @property
    def nbytes(self) -> int:
        return sum(kept.nbytes for kept in self._kept)

    def take(self, obj: Any) -> Any:
        """A copy of the object, of plain containers at any depth. What an earlier one held is overwritten."""
        self._used = 0
        try:
            with torch.no_grad():
                copied = _mapped(obj, self._of_value)
                host_copies.copy(self._fresh, fresh=True)
                host_copies.copy(self._pairs)
            if any(t.is_cuda for t in self._originals):
                torch.cuda.synchronize()
            return copied
        finally:
            del self._kept[self._used :]
            self._copies, self._found, self._originals, self._fresh, self._pairs = {}, {}, [], [], []

    def _of_value(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)
        if local_shard.is_dtensor(value):
            from torch.distributed.tensor import DTensor

            local = self._of_tensor(value.detach().to_local())  # type: ignore[attr-defined]
            mesh, placements = value.device_mesh, value.placements  # type: ignore[attr-defined]
            shape, stride = value.shape, value.stride()
            return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
        return self._of_tensor(value)

    def _of_tensor(self, t: Tensor) -> Tensor:
        if isinstance(t, StateTensor):
            return self._of_state(t)
        if isinstance(t, LargeTensor):
            copied = self._of_plain(t.as_subclass(Tensor))
            return large_tensor.like(t, copied)
        if type(t) not in (Tensor, torch.nn.Parameter, dense.SharingTensor) or t.layout is not torch.strided:
            return copy.deepcopy(t)
        return self._of_plain(t.detach().as_subclass(Tensor))

    def _of_state(self, t: StateTensor) -> Tensor:
        source = t.handle.source
        if isinstance(source, PlainState):
            return StateTensor(t.handle._replace(source=PlainState(self._of_plain(source.flat))))
        if source.pending:  # it is being loaded into
            return copy.deepcopy(t)
        state = {key: self._of_plain(value) for key, value in source.state.items()}
        weight = self._of_plain(source.weight)
        return StateTensor(t.handle._replace(source=EncodedState(weight, state, source.kinds, source.key)))

    def _of_plain(self, t: Tensor) -> Tensor:
        """Each memory once. It is copied when all of them are known."""
        found = self._found.get(id(t))
        if found is None:
            self._originals.append(t)
            found = self._found[id(t)] = self._of_memory(t)
        return found

    def _of_memory(self, t: Tensor) -> Tensor:
        if not dense.is_dense(t):
            t = t.contiguous()
            self._originals.append(t)
        key = t.data_ptr(), t.dtype, t.shape, t.stride()
        if not t.numel() or key not in self._copies:
            self._copies[key] = self._buffer(t)
        return self._copies[key]

    def _buffer(self, t: Tensor) -> Tensor:
        """The next one that is kept, where it is like t; else a new one in its place."""
        at = self._used
        self._used += 1
        if at < len(self._kept) and dense.same_order(self._kept[at], t) and self._kept[at].dtype == t.dtype:
            made, pairs = self._kept[at], self._pairs
        else:
            made = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, pin_memory=t.is_cuda, device="cpu")
            self._kept[at:], pairs = [made], self._fresh
        pairs.append((dense.flat(made), dense.flat(t)))
        return made


def _mapped(obj: Any, of: Callable[[Any], Any]) -> Any:
    if isinstance(obj, dict):
        made = copy.copy(obj)
        for key, value in obj.items():
            made[key] = _mapped(value, of)
        return made
    if type(obj) in (list, tuple):
        return type(obj)(_mapped(value, of) for value in obj)
    return of(obj)
