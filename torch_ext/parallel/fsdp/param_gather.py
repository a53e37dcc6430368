"""The weights of a model sharded by FSDP2: their asynchronous all-gathers, and dropping gathered weights that are out
of date."""

import weakref
from collections.abc import Callable, Iterator, Sequence, Set
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from torch_ext.comm.communicator import Work
from torch_ext.comm.wire import WireBuffer
from torch_ext.parallel.fsdp.reduce_scatter import GATHER, UnitCommunicators, UnitPlan
from torch_ext.params import local_shard
from torch_ext.policy import fsdp_groups
from torch_ext.tensors import offload_guard

Place: TypeAlias = tuple[weakref.ref[nn.Module], str]
"""A parameter's place: the module, referred to weakly, and the parameter's name there."""


def _reshard_after_failed_forward(module: Any) -> None:
    """Reshards a module whose forward raised. FSDP2 takes that forward for still running, and reshard() then keeps the
    unsharded weights, or shards them over fewer ranks, according to reshard_after_forward. So that setting is
    overridden for this call."""
    groups = list(fsdp_groups.of_module(module))
    kept = [group.post_forward_mesh_info for group in groups]
    module.set_reshard_after_forward(True, recurse=False)
    module.reshard()
    for group, mesh_info in zip(groups, kept, strict=True):
        group.post_forward_mesh_info = mesh_info


class UsedParams:
    """Records which parameters got a gradient, by hooks of the unsharded parameters, which exist from the first forward
    on."""

    def __init__(
        self, params: Sequence[nn.Parameter], units: Sequence[Sequence[nn.Module]], places: Sequence[Sequence[Place]]
    ) -> None:
        """params: the shards. units, places: each unit's modules, and the places of its parameters."""
        self._params = params
        self._unsharded: dict[int, torch.Tensor] = {}
        self._reached: set[int] = set()
        position = {id(p): i for i, p in enumerate(params)}
        self._hooks: list[Any] = []
        for unit, of_unit in zip(units, places, strict=True):
            known = [(module, name, position.get(_param_id(module, name))) for module, name in of_unit]
            self._hooks += [module.register_forward_pre_hook(partial(self._watch, known)) for module in unit]

    def _watch(self, places: Sequence[tuple[weakref.ref[nn.Module], str, int | None]], *_: Any) -> None:
        """Forward pre-hook: hooks the unsharded parameters, which FSDP2's earlier pre-hook has put into the modules."""
        for module, name, i in places:
            if i is None or (owner := module()) is None or (whole := owner._parameters.get(name)) is None:
                continue
            if whole.requires_grad and whole is not self._params[i] and whole is not self._unsharded.get(i):
                self._unsharded[i] = whole
                self._hooks.append(whole.register_post_accumulate_grad_hook(partial(_mark_reached, self._reached, i)))

    def take(self, i: int) -> bool:
        """Whether parameter i got a gradient since the last call. True if its unsharded parameter was never seen."""
        reached = i in self._reached or i not in self._unsharded
        self._reached.discard(i)
        return reached

    def forget(self) -> None:
        """Forgets the gradients of a failed backward, which FSDP2 has not reduced."""
        self._reached.clear()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _param_id(module: weakref.ref[nn.Module], name: str) -> int:
    owner = module()
    return id(None if owner is None else owner._parameters[name])


def _mark_reached(reached: set[int], i: int, _unsharded: torch.Tensor) -> None:
    reached.add(i)


class _GradCleaner:
    """Forward pre-hook that drops the gradients of a unit's unsharded parameters, if `wanted`. After a backward that
    raised, FSDP2 would add these gradients to the next ones. FSDP2's earlier pre-hook puts the unsharded parameters
    into the module."""

    def __init__(self, module: nn.Module, known: Set[int]) -> None:
        """known: ids of the shards, and of parameters that FSDP2 does not shard: their gradients stay."""
        self.wanted = False
        """Whether the next forward drops the gradients."""
        self.last = False
        """Whether the next forward removes this hook: the reducer is closed."""
        self._known = known
        self._hook = module.register_forward_pre_hook(self)

    def __call__(self, module: nn.Module, _inputs: Any) -> None:
        if self.wanted:
            self.wanted = False
            for param in module.parameters():
                if id(param) not in self._known:
                    param.grad = None
        if self.last:
            self._hook.remove()


class ParamGather:
    """Gathers the weights of FSDP2's units. Refers to their modules weakly."""

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        units: Sequence[Sequence[nn.Module]],
        communicators: UnitCommunicators,
        prefetch: bool,
        zeros: bool,
        guarded: Callable[[Callable[[], Any]], Any],
    ) -> None:
        """params: the shards. units: each unit's modules. prefetch: from the second forward on, a unit's weights are
        gathered while the unit before it runs. zeros: whether FSDP2 reduces zeros for parameters without gradients.
        guarded: calls its argument and records a failure."""
        self._params, self._communicators, self._guarded = params, communicators, guarded
        self._modules = [weakref.ref(unit[0]) for unit in units]
        self._failure: str | None = None  # the first error of an all-gather
        self._gathering: set[int] = set()  # units whose weights FSDP2 has not asked for yet
        self._order: list[int] | None = [] if prefetch else None  # the units, as the first forward gathers them
        inside = {m for unit in units for module in unit for m in module.modules() if m is not module}
        self._roots = [i for i, unit in enumerate(units) if unit[0] not in inside]
        modules = [module for unit in units for module in unit]
        # The ids of the shards, and of parameters that FSDP2 does not shard.
        self._known = {id(p) for module in modules for p in module.parameters()}
        self._places = [[*_places(unit, {*modules})] for unit in units]
        self.used = UsedParams(params, units, self._places) if zeros else None
        self._grad_cleaners = [_GradCleaner(module, self._known) for module in modules]

    def close(self) -> None:
        """Drops the gradients of unsharded parameters at the next forward: before it they cannot be reached."""
        for cleaner in self._grad_cleaners:
            cleaner.wanted = cleaner.last = True
        if self.used is not None:
            self.used.close()

    def _module(self, unit: int) -> Any:
        """Returns the unit's first module, an FSDPModule; None if it was deleted."""
        return self._modules[unit]()

    def refuse_offloaded(self) -> None:
        """Raises RuntimeError if the shards are offloaded (see `offloading/offload.py`)."""
        try:
            offload_guard.refuse_params(self._params, "FSDP2 gathers weights")
        except RuntimeError:
            self.recover()  # FSDP2 may be in the middle of a backward
            raise

    def all_gather(self, unit: UnitPlan, output: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> Work:
        """Starts to gather a unit's weights into `output`. part: this rank's weights, maybe a view of `output`."""
        if self._order is not None and unit.number not in self._order:
            self._order.append(unit.number)
        self._gathering.add(unit.number)
        self._communicators.sent.begin_forward()
        communicator = self._communicators.of(group, GATHER)
        own = output.chunk(communicator.world_size)[communicator.rank]
        if own.data_ptr() != part.data_ptr():
            own.copy_(part)
        number = self._communicators.tag(0, GATHER, unit, output.nbytes)
        label = f"weights of {unit}"
        handle: Work = self._try(
            lambda: communicator.all_gather_into_buffer(WireBuffer.of(output), tag=number, label=label)
        )
        return handle

    def gathered(self, unit: UnitPlan, handle: Work) -> None:
        """Waits for the unit's weights, which FSDP2 needs now."""
        self._gathering.discard(unit.number)
        self._try(handle.result)

    def _try(self, call: Callable[[], Any]) -> Any:
        if self._failure is not None:  # FSDP2 would go on with memory that was not written
            raise RuntimeError(f"weights cannot be gathered any more: {self._failure}")
        try:
            return self._guarded(call)
        except RuntimeError as error:
            self._failure = str(error)
            raise

    def drop_gathered(self) -> None:
        """Drops weights gathered for units that did not run: in the next forward they would be out of date."""
        for i in sorted(self._gathering):
            if (module := self._module(i)) is not None:
                module.unshard()
                module.reshard()

    def reshard(self) -> None:
        """Drops all gathered weights, also those under way. An evaluation, or a forward that raised, may have left
        them; after a step they would be out of date."""
        self.drop_gathered()
        for i in range(len(self._modules)):
            module = self._module(i)
            if module is not None and self._is_unsharded(i):
                module.reshard()
                if self._is_unsharded(i):
                    _reshard_after_failed_forward(module)

    def _is_unsharded(self, unit: int) -> bool:
        """Whether the unit is unsharded. Checks one parameter: a unit is unsharded as a whole."""
        module, name = next(((module(), name) for module, name in self._places[unit]), (None, ""))
        return module is not None and id(module._parameters[name]) not in self._known

    def prefetch_in_order(self) -> None:
        """Sets up prefetching in the order of the first forward, once: from the next forward on, a unit's weights are
        gathered while the unit before it runs."""
        order, self._order = self._order, None
        if order is None:
            return
        root = 0  # runs first, even if it has no weights of its own
        for before, after in pairwise([root, *(i for i in order if i != root)]):
            first, second = self._module(before), self._module(after)
            if first is not None and second is not None:
                first.set_modules_to_forward_prefetch([second])

    def recover(self) -> bool:
        """Resets FSDP2's state after a backward that raised. Returns whether this torch can do that."""
        for cleaner in self._grad_cleaners:
            cleaner.wanted = True
        if self.used is not None:
            self.used.forget()
        if self._failure is not None:
            return True  # no forward will succeed any more
        roots = [module for i in self._roots if (module := self._module(i)) is not None]
        if not all(hasattr(module, "reset_iter_state") for module in roots):  # torch >= 2.13
            return False
        for module in roots:
            module.reset_iter_state()
        return True


def _places(unit: Sequence[nn.Module], of_units: Set[nn.Module]) -> Iterator[Place]:
    """Yields the places of a unit's sharded parameters. of_units: all units' modules."""
    for module in unit:
        yield from ((weakref.ref(module), name) for name, p in module._parameters.items() if _is_sharded(p))
        yield from _places([child for child in module.children() if child not in of_units], of_units)


def _is_sharded(param: nn.Parameter | None) -> bool:
    return param is not None and local_shard.is_dtensor(param)
