"""Which parts of an optimizer's parameters this rank updates, and where their gradients are."""

import operator
import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from torch_ext.comm import group_calls
from torch_ext.grads.norm import NormGroup
from torch_ext.native import direct_call
from torch_ext.params import reducer_registry
from torch_ext.params.local_shard import LocalShard, is_dtensor, of_dtensor, tensor_of
from torch_ext.params.reducer_registry import GradientReducer, StepListener
from torch_ext.tensors import offload_guard


def _layouts(owners: Sequence[GradientReducer | None]) -> list[tuple["weakref.ref[GradientReducer]", int] | None]:
    return [None if owner is None else (weakref.ref(owner), owner.layout) for owner in owners]


class ShardMap:
    """The local shards of an optimizer's parameters, by the reducers' layout at construction (see `fits`)."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.params, self._generation = list(params), reducer_registry.generation
        owners = list(map(reducer_registry.owner_of, params))
        self._layouts = _layouts(owners)
        self.owners: list[GradientReducer | None] = [o if o is not None and o.sharded else None for o in owners]
        self._dtensors = [owner is None and is_dtensor(p) for p, owner in zip(params, self.owners, strict=True)]
        self.plain = not any(self._dtensors) and not any(owner is not None for owner in self.owners)
        """Whether every parameter is updated as a whole, as a plain tensor."""
        self.sharded = any(owner is not None for owner in self.owners)
        """Whether some gradients are not in `.grad`."""
        self.flat_shards = any(o is not None and not is_dtensor(p) for p, o in zip(params, self.owners, strict=True))
        """Whether this rank updates flat parts of some parameters."""
        self._tensors = self._local_tensors()
        self._listeners = reducer_registry.step_listeners(params)
        self._ranks = {o.ranks for o in set(owners) if o is not None}

    def listeners(self) -> list[StepListener]:
        """Returns the objects to notify of a step of these parameters."""
        return [listener for ref in self._listeners if (listener := ref()) is not None]

    def refuse_mixed(self) -> None:
        """Raises RuntimeError if gradients are reduced over different sets of ranks: the norm would differ by rank."""
        if len(self._ranks) > 1:
            sets = " and ".join(str(sorted(ranks)) for ranks in sorted(self._ranks, key=sorted))
            raise RuntimeError(
                f"this optimizer has parameters whose gradients are reduced over ranks {sets}: the norm of all of "
                "them, and whether it is finite, would differ between ranks. Make one optimizer for the parameters "
                "of each process group and clip each"
            )

    def _local_tensors(self) -> list[Tensor]:
        """Returns the local tensors of the DTensors among the parameters."""
        return [tensor_of(p) for p, is_one in zip(self.params, self._dtensors, strict=True) if is_one]

    @property
    def still_plain(self) -> bool:
        """Whether every parameter is still updated as a whole, as a plain tensor, and nobody listens; as of the last
        call of `fits`. Cheaper than `fits`, and False more often."""
        return self.plain and not self._listeners and reducer_registry.generation == self._generation

    def fits(self, params: Sequence[Tensor]) -> bool:
        """Whether parameters, layouts and the DTensors' addresses are unchanged.

        Other models may be created and deleted (by the garbage collector, too) at any time. That changes `generation`,
        but not the layouts of these parameters, so these are compared then."""
        if len(params) != len(self.params) or not all(map(operator.is_, params, self.params)):
            return False
        generation = reducer_registry.generation
        if generation != self._generation:
            if _layouts(list(map(reducer_registry.owner_of, params))) != self._layouts:
                return False
            self._generation, self._listeners = generation, reducer_registry.step_listeners(params)
        if not self._tensors:
            return True
        return list(map(Tensor.data_ptr, self._local_tensors())) == list(map(Tensor.data_ptr, self._tensors))

    def memory(self) -> list[tuple[int, bool]]:
        """Returns address and contiguity of each local part that is no DTensor; `fits` does not check these."""
        if self.plain:
            return [(p.data_ptr(), p.is_contiguous()) for p in self.params]
        parts = [self.of(i).weight for i, is_one in enumerate(self._dtensors) if not is_one]
        return [(part.data_ptr(), part.is_contiguous()) for part in parts]

    def of(self, i: int) -> LocalShard:
        owner = self.owners[i]
        if owner is not None:
            return owner.local(self.params[i])
        if self._dtensors[i]:
            return of_dtensor(self.params[i])
        return LocalShard(self.params[i], 0, (), None)

    def grads(self) -> list[Tensor | None]:
        """Returns the gradient of each parameter's local part; None for a parameter without one. Raises as
        `counted_grads`."""
        return self.counted_grads()[0]

    def counted_grads(self) -> tuple[list[Tensor | None], int]:
        """Returns what `grads` returns, and how many of them are None.

        Raises RuntimeError if a parameter or gradient is offloaded. A gradient whose placements differ from its
        DTensor's is redistributed and stored in `.grad`, so that what a caller writes to it reaches the step."""
        offload_guard.refuse_gradients(self.params, "a clip, an unscale or a step")
        if self.plain:
            return direct_call.grads(self.params)
        found = [self._grad(i) for i in range(len(self.params))]
        return found, sum(grad is None for grad in found)

    def _grad(self, i: int) -> Tensor | None:
        param, owner = self.params[i], self.owners[i]
        if owner is not None:
            return owner.grad(param)
        grad: Any = param.grad
        if grad is None or not self._dtensors[i]:
            return grad
        if tuple(grad.placements) != tuple(param.placements):  # type: ignore[attr-defined]
            with group_calls.translated_over(grad.device_mesh, "a gradient that is not sharded as its parameter is"):
                grad = grad.detach().redistribute(placements=param.placements)  # type: ignore[attr-defined]
            param.grad = grad
        return tensor_of(grad)  # the same object at every call: clipping marks gradients by attributes on it

    def parts(self, present: Sequence[bool]) -> list[NormGroup]:
        """Groups the present gradients by the process groups that all-reduce their statistics. Positions in the result
        count present gradients only."""
        found: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
        at = 0
        for i, there in enumerate(present):
            if there:
                owner = self.owners[i]
                key = self.of(i).groups if owner is None else (owner,)
                found.setdefault(key, []).append((at, i))
                at += 1
        return [self._part(key, members) for key, members in found.items()]

    def _part(self, key: tuple[Any, ...], members: list[tuple[int, int]]) -> NormGroup:
        positions = [at for at, _ in members]
        first = members[0][1]
        owner = self.owners[first]
        if owner is None:
            return NormGroup(key, positions, None)
        return NormGroup(self.of(first).groups, positions, owner.stats([self.params[i] for _, i in members]))
