"""Copies a training state into host memory that is allocated once and used again.

State tensors that are stored compressed are copied in that form, so the copy takes as much memory as the state itself.
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
    """Host memory for one copy of a state. All attributes but `_kept` are used during `take` only."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []  # the memory, which the next copy uses again
        self._used = 0  # how many of these tensors the copy has used so far
        self._copies_by_memory: dict[Any, Tensor] = {}  # by address, dtype, shape and strides of the original
        self._copies_by_id: dict[int, Tensor] = {}  # by id of the original, which is quicker to look up
        self._originals: list[Tensor] = []  # kept alive, so that no new tensor gets the id or address of one of them
        self._fresh: list[tuple[Tensor, Tensor]] = []  # (target, source) still to copy, into newly allocated memory
        self._pairs: list[tuple[Tensor, Tensor]] = []  # (target, source) still to copy, into memory used before

    @property
    def nbytes(self) -> int:
        return sum(kept.nbytes for kept in self._kept)

    def take(self, obj: Any) -> Any:
        """Returns a copy of `obj`, which may be plain containers nested to any depth. Overwrites the previous copy."""
        self._used = 0
        try:
            with torch.no_grad():
                copied = _mapped(obj, self._copy_value)
                host_copies.copy(self._fresh, fresh=True)
                host_copies.copy(self._pairs)
            if any(t.is_cuda for t in self._originals):
                torch.cuda.synchronize()
            return copied
        finally:
            del self._kept[self._used :]
            self._copies_by_memory, self._copies_by_id, self._originals, self._fresh, self._pairs = {}, {}, [], [], []

    def _copy_value(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)
        if local_shard.is_dtensor(value):
            from torch.distributed.tensor import DTensor

            local = self._copy_tensor(value.detach().to_local())  # type: ignore[attr-defined]
            mesh, placements = value.device_mesh, value.placements  # type: ignore[attr-defined]
            shape, stride = value.shape, value.stride()
            return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
        return self._copy_tensor(value)

    def _copy_tensor(self, t: Tensor) -> Tensor:
        if isinstance(t, StateTensor):
            return self._copy_state_tensor(t)
        if isinstance(t, LargeTensor):
            copied = self._copy_plain(t.as_subclass(Tensor))
            return large_tensor.like(t, copied)
        if type(t) not in (Tensor, torch.nn.Parameter, dense.SharingTensor) or t.layout is not torch.strided:
            return copy.deepcopy(t)
        return self._copy_plain(t.detach().as_subclass(Tensor))

    def _copy_state_tensor(self, t: StateTensor) -> Tensor:
        source = t.handle.source
        if isinstance(source, PlainState):
            return StateTensor(t.handle._replace(source=PlainState(self._copy_plain(source.flat))))
        if source.pending:  # a load into this state is under way
            return copy.deepcopy(t)
        state = {key: self._copy_plain(value) for key, value in source.state.items()}
        weight = self._copy_plain(source.weight)
        return StateTensor(t.handle._replace(source=EncodedState(weight, state, source.kinds, source.key)))

    def _copy_plain(self, t: Tensor) -> Tensor:
        """Returns the host tensor for a copy of t. Tensors in the same memory share one. `take` copies the data, when
        all tensors are known."""
        found = self._copies_by_id.get(id(t))
        if found is None:
            self._originals.append(t)
            found = self._copies_by_id[id(t)] = self._copy_memory(t)
        return found

    def _copy_memory(self, t: Tensor) -> Tensor:
        if not dense.is_dense(t):
            t = t.contiguous()
            self._originals.append(t)
        key = t.data_ptr(), t.dtype, t.shape, t.stride()
        if not t.numel() or key not in self._copies_by_memory:
            self._copies_by_memory[key] = self._buffer(t)
        return self._copies_by_memory[key]

    def _buffer(self, t: Tensor) -> Tensor:
        """Returns the next kept tensor if its dtype, shape and memory order are t's. Otherwise allocates a new one and
        drops the kept tensors from there on."""
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
