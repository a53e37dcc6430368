"""The weights of a model sharded by FSDP2: asynchronous all-gathers, and gathered weights that have become stale."""

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
"""Where a parameter is: a module, which is not kept alive, and the name there."""


def _reshard_after_failed_forward(module: Any) -> None:
    """For FSDP2 a forward that raised still runs, after which a unit keeps all its weights, or all of them over fewer
    ranks, where reshard_after_forward says so."""
    groups = list(fsdp_groups.of_module(module))
    kept = [group.post_forward_mesh_info for group in groups]
    module.set_reshard_after_forward(True, recurse=False)
    module.reshard()
    for group, mesh_info in zip(groups, kept, strict=True):
        group.post_forward_mesh_info = mesh_info


class UsedParams:
    """Which parameters got a gradient: hooks of the unsharded parameters, which the first forward shows, tell."""

    def __init__(
        self, params: Sequence[nn.Parameter], units: Sequence[Sequence[nn.Module]], places: Sequence[Sequence[Place]]
    ) -> None:
        """params: the shards. units: the modules of each, and the places of its parameters."""
        self._params = params
        self._whole: dict[int, torch.Tensor] = {}
        self._reached: set[int] = set()
        position = {id(p): i for i, p in enumerate(params)}
        self._hooks: list[Any] = []
        for unit, of_unit in zip(units, places, strict=True):
            known = [(module, name, position.get(_param_id(module, name))) for module, name in of_unit]
            self._hooks += [module.register_forward_pre_hook(partial(self._watch, known)) for module in unit]

    def _watch(self, places: Sequence[tuple[weakref.ref[nn.Module], str, int | None]], *_: Any) -> None:
        """Runs after FSDP2's hook, which puts unsharded parameters into a unit's modules."""
        for module, name, i in places:
            if i is None or (owner := module()) is None or (whole := owner._parameters.get(name)) is None:
                continue
            if whole.requires_grad and whole is not self._params[i] and whole is not self._whole.get(i):
                self._whole[i] = whole
                self._hooks.append(whole.register_post_accumulate_grad_hook(partial(_mark_reached, self._reached, i)))

    def take(self, i: int) -> bool:
        """Whether it got a gradient since the last call. True where the unsharded parameter was never seen."""
        reached = i in self._reached or i not in self._whole
        self._reached.discard(i)
        return reached

    def forget(self) -> None:
        """Gradients that FSDP2 has not reduced are dropped."""
        self._reached.clear()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _param_id(module: weakref.ref[nn.Module], name: str) -> int:
    owner = module()
    return id(None if owner is None else owner._parameters[name])


def _mark_reached(reached: set[int], i: int, _whole: torch.Tensor) -> None:
    reached.add(i)


class _GradCleaner:
    """Drops the gradients of unsharded parameters, which after a backward that raised FSDP2 would add to the next ones:
    a hook of a unit's module, after FSDP2's, which puts these parameters into it."""

    def __init__(self, module: nn.Module, known: Set[int]) -> None:
        """known: ids of all other parameters."""
        self.wanted = False
        self.last = False
        """Whether the reducer is closed."""
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
    """Knows the units by their modules, which it does not keep alive."""

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        units: Sequence[Sequence[nn.Module]],
        communicators: UnitCommunicators,
        prefetch: bool,
        zeros: bool,
        guarded: Callable[[Callable[[], Any]], Any],
    ) -> None:
        """params: the shards. units: the modules of each. prefetch: from the second forward on, each unit's weights
        are gathered while the one before runs. zeros: FSDP2 reduces them for parameters without gradients. guarded:
        calls its argument, and remembers a failure."""
        self._params, self._communicators, self._guarded = params, communicators, guarded
        self._modules = [weakref.ref(unit[0]) for unit in units]
        self._failure: str | None = None  # of a gather
        self._gathering: set[int] = set()  # units whose weights FSDP2 has not asked for yet
        self._order: list[int] | None = [] if prefetch else None  # of units in the first forward
        inside = {m for unit in units for module in unit for m in module.modules() if m is not module}
        self._roots = [i for i, unit in enumerate(units) if unit[0] not in inside]
        modules = [module for unit in units for module in unit]
        self._known = {id(p) for module in modules for p in module.parameters()}  # shards, and what is not sharded
        self._places = [[*_places(unit, {*modules})] for unit in units]
        self.used = UsedParams(params, units, self._places) if zeros else None
        self._grad_cleaners = [_GradCleaner(module, self._known) for module in modules]

    def close(self) -> None:
        """Gradients are dropped; those of unsharded parameters are out of reach until the next forward."""
        for cleaning in self._grad_cleaners:
            cleaning.wanted = cleaning.last = True
        if self.used is not None:
            self.used.close()

    def _module(self, unit: int) -> Any:
        """An FSDPModule; None where it was deleted."""
        return self._modules[unit]()

    def refuse_offloaded(self) -> None:
        """RuntimeError where there are no shards to gather (see `offloading/offload.py`)."""
        try:
            offload_guard.refuse_params(self._params, "FSDP2 gathers weights")
        except RuntimeError:
            self.recover()  # FSDP2 is in the middle of a backward
            raise

    def all_gather(self, unit: UnitPlan, output: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> Work:
        """Starts to gather a unit's weights into `output`; part: this rank's, which may lie there already."""
        if self._order is not None and unit.number not in self._order:
            self._order.append(unit.number)
        self._gathering.add(unit.number)
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
        """FSDP2 waits for the unit's weights."""
        self._gathering.discard(unit.number)
        self._try(handle.result)

    def _try(self, call: Callable[[], Any]) -> Any:
        if self._failure is not None:  # FSDP2 would wait again, and take unwritten memory for weights
            raise RuntimeError(f"weights cannot be gathered any more: {self._failure}")
        try:
            return self._guarded(call)
        except RuntimeError as error:
            self._failure = str(error)
            raise

    def drop_gathered(self) -> None:
        """Weights gathered for a unit that did not run would be stale in the next forward."""
        for i in sorted(self._gathering):
            if (module := self._module(i)) is not None:
                module.unshard()
                module.reshard()

    def reshard(self) -> None:
        """Drops gathered weights, also those under way, which an evaluation or a forward that raised may have left
        behind: they would be stale after a step."""
        self.drop_gathered()
        for i in range(len(self._modules)):
            module = self._module(i)
            if module is not None and self._is_unsharded(i):
                module.reshard()
                if self._is_unsharded(i):
                    _reshard_after_failed_forward(module)

    def _is_unsharded(self, unit: int) -> bool:
        """Looks at one parameter: a unit is unsharded as a whole."""
        module, name = next(((module(), name) for module, name in self._places[unit]), (None, ""))
        return module is not None and id(module._parameters[name]) not in self._known

    def prefetch_in_order(self) -> None:
        """From the second forward on, each unit's weights are gathered while the unit before it runs."""
        order, self._order = self._order, None
        if order is None:
            return
        root = 0  # runs first, also without weights of its own
        for before, after in pairwise([root, *(i for i in order if i != root)]):
            first, second = self._module(before), self._module(after)
            if first is not None and second is not None:
                first.set_modules_to_forward_prefetch([second])

    def recover(self) -> bool:
        """Makes FSDP2 forget a backward that raised; whether it can."""
        for cleaning in self._grad_cleaners:
            cleaning.wanted = True
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
    """The places of the unit's sharded parameters. of_units: all units' modules."""
    for module in unit:
        yield from ((weakref.ref(module), name) for name, p in module._parameters.items() if _is_sharded(p))
        yield from _places([child for child in module.children() if child not in of_units], of_units)


def _is_sharded(param: nn.Parameter | None) -> bool:
    return param is not None and local_shard.is_dtensor(param)
