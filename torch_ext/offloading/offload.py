"""`offload` and `onload`: weights, gradients and optimizer states leave the device for a while, and come back.

A storage goes, not a tensor: it is resized to nothing and later to what it was, so that parameters, the views that
flat buffers consist of, and every other tensor in it stay the objects that they were.
"""

import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from torch_ext.offloading import hooks, host_buffer
from torch_ext.offloading.transfer import Offloaded, Released, StorageTransfer
from torch_ext.optim.adamw import Adam
from torch_ext.optim.state import access
from torch_ext.parallel import parallelize
from torch_ext.params import local_shard, reducer_registry
from torch_ext.params.param_groups import innermost
from torch_ext.tensors import offload_guard, storage
from torch_ext.tensors.storage import Memory

Named: TypeAlias = list[tuple[str, Tensor]]

_HOST = ("cpu", "meta")  # no accelerator's


class _ModelAccount:
    """What of a model is away, and what keeps others from using it."""

    def __init__(self, pinned: bool) -> None:
        self.pinned = pinned
        self.params, self.grads = Offloaded(pinned), Released()
        self.params_away = self.grads_away = False
        self._guards = ExitStack()

    @property
    def away(self) -> bool:
        return self.params_away or self.grads_away

    def guard(self, model: nn.Module) -> None:
        """As it is away now."""
        self._guards.close()
        named = list(model.named_parameters())
        if self.params_away:
            self._guards.callback(offload_guard.params.add(named))
            hooks.of_modules(self._guards, model.modules())
        if self.grads_away:
            self._guards.callback(offload_guard.grads.add(named))
        if self.away:
            hooks.of_gradients(self._guards, (p for _, p in named))


class _OptimizerAccount:
    def __init__(self, pinned: bool) -> None:
        self.pinned = pinned
        self.states = Offloaded(pinned)
        self.away = False
        self._guards = ExitStack()

    def guard(self, optimizer: torch.optim.Optimizer) -> None:
        """As it is away now."""
        self._guards.close()
        if self.away:
            offload_guard.optimizers.add(optimizer)
            self._guards.callback(offload_guard.optimizers.discard, optimizer)
            hooks.of_optimizer(self._guards, optimizer)


_models: "weakref.WeakKeyDictionary[nn.Module, _ModelAccount]" = weakref.WeakKeyDictionary()
_optimizers: "weakref.WeakKeyDictionary[torch.optim.Optimizer, _OptimizerAccount]" = weakref.WeakKeyDictionary()


class _OffloadPlan:
    """One call: the models and the optimizer that it is about, and what is known of them."""

    def __init__(
        self,
        doing: str,
        model: nn.Module | Iterable[nn.Module],
        optimizer: torch.optim.Optimizer | None,
        weights: bool = False,
    ) -> None:
        """doing: for messages. weights: they are to leave. RuntimeError where somebody works with the memory that is
        about to move."""
        self.models = list(model) if isinstance(model, Iterable) and not isinstance(model, nn.Module) else [model]
        for one in self.models:
            if not isinstance(one, nn.Module):
                raise TypeError(
                    f"model is, or contains, a {type(one).__name__}; a torch.nn.Module, or several, is legal"
                )
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer is a {type(optimizer).__name__}; a torch.optim.Optimizer or None is legal")
        self.doing = doing
        self.optimizer = optimizer = None if optimizer is None else innermost(optimizer)
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(f"{doing} during a backward: call it between steps")
        for one in self.models:
            for engine in parallelize.engines_in(one):
                engine.refuse_moving(doing, weights)
        if isinstance(optimizer, Adam):
            optimizer.refuse_moving(doing)
        _reshard(self.models)
        self.weights: Named = [named for one in self.models for named in _weights(one)]
        self.params = [p for one in self.models for p in one.parameters()]
        self.owners = list(reducer_registry.owners_of(self.params))
        self._refuse_parts()
        everything = [*(t for _, t in self.weights), *(t for _, t in _states(optimizer))]
        # Where there is an accelerator, what is in host memory already stays there; else it stands in for a device's.
        self.accelerated = any(t.device.type not in _HOST for t in everything)
        self.devices = {t.device for t in everything if t.device.type not in _HOST}

    def account_of(self, model: nn.Module) -> _ModelAccount:
        account = _models.get(model)
        if account is None or (account.pinned != self.accelerated and not account.away):
            account = _models[model] = _ModelAccount(self.accelerated)
        return account

    def account_of_optimizer(self) -> _OptimizerAccount | None:
        if self.optimizer is None:
            return None
        account = _optimizers.get(self.optimizer)
        if account is None or (account.pinned != self.accelerated and not account.away):
            account = _optimizers[self.optimizer] = _OptimizerAccount(self.accelerated)
        return account

    def accounts(self) -> list[tuple[nn.Module, _ModelAccount]]:
        return [(model, self.account_of(model)) for model in self.models]

    def memories(self, named: Iterable[tuple[str, Tensor]], known: set[int]) -> list[Memory]:
        """On the device, without the known ones, which they are added to."""
        new = {a: m for a, m in storage.found(named).items() if a not in known}
        known.update(new)
        return [m for m in new.values() if not self.accelerated or m.storage.device.type != "cpu"]

    def _refuse_parts(self) -> None:
        own = {id(p) for p in self.params}
        for owner in self.owners:
            if any(id(p) not in own for p in owner.params):
                raise RuntimeError(
                    f"{self.doing} of a part of a parallelized model, whose parameters lie in common buffers: pass the "
                    "model itself"
                )

    def refuse_strangers(self, coming: Iterable[StorageTransfer]) -> None:
        """RuntimeError where weights are away that this call does not know."""
        known = {id(memory.storage) for luggage in coming for memory in luggage.memories()}
        for name, weight in self.weights:
            for t in storage.unwrapped(weight):
                if storage.is_released(t) and id(t.untyped_storage()) not in known:
                    raise RuntimeError(
                        f"{self.doing}: the memory of {name} went with another model, of which it is a part too: pass "
                        "both models in one call, as a list"
                    )


def offload(
    model: nn.Module | Iterable[nn.Module],
    optimizer: torch.optim.Optimizer | None = None,
    *,
    params: bool = True,
    grads: bool = True,
    states: bool = True,
) -> None:
    """Moves weights, gradients and optimizer states out of the device's memory, until `onload`. Call it between steps.

    model: a module, parallelized or not, or several (the chunks of a pipeline, models with tied weights); what
        torch.compile returned, if that is called. Its weights are parameters, frozen ones too, and buffers.
    optimizer: ours or any of torch's form, in a framework's wrapper or not; None, or one that has no state yet, is
    fine.
    params: weights are copied to host memory.
    grads: gradients are dropped: `.grad` is None until onload, and what was there comes back as the same tensors, zero.
        Buffers and shards of a parallelized model go, too; those of DistributedDataParallel are its own and stay.
    states: of the optimizer, masters included, are copied to host memory; the step counters stay, and what
        offload_fraction keeps on the host is there already.

    Host memory is allocated once, pinned where the device is an accelerator, and kept for the next time, as long as the
    model and the optimizer live. Without an accelerator host memory stands in for the device's: the same code releases
    and brings back storages there. Tensors remain the objects that they were, with shape, strides and what views what;
    addresses change, which a captured CUDA graph does not survive. torch.cuda.empty_cache() gives the room to other
    processes. Not collective: each rank moves its own.

    What is away already stays so; each kind may be moved by itself. While something is away, a forward, a backward, a
    step, a clip, and saving and loading by state_dict raise RuntimeError as far as they need it, naming `onload`. Other
    code of yours must not touch these tensors, those of a state_dict that was handed out before among them: reading one
    ends the process. A graph that was made before cannot be backpropagated through any more, not after onload either.

    Raises RuntimeError, and has changed nothing, for a backward, a forward or an exchange under way; for gradients that
    were stepped in backward and no step() since; within master_weights(); for memory that is not torch's alone
    (`.numpy()`, share_memory_(), a mapped file, a state_dict of a model with flat buffers that is held still), and
    where there is not enough host memory.
    """
    trip = _OffloadPlan("offload", model, optimizer, weights=params)
    accounts, of_optimizer = trip.accounts(), trip.account_of_optimizer()
    trip.refuse_strangers([account.params for _, account in accounts])
    stays = trip.optimizer.stays() if isinstance(trip.optimizer, Adam) else ()
    known = set(storage.found(("", t) for t in stays))
    leaving: list[tuple[StorageTransfer, list[Memory]]] = []
    # Memory that is of two kinds is of the first of them.
    found = [trip.memories(_weights(one), known) for one in trip.models]
    if params:
        leaving += [(account.params, memories) for (_, account), memories in zip(accounts, found, strict=True)]
    found = [trip.memories(_gradients(one), known) for one in trip.models]
    if grads:
        leaving += [(account.grads, memories) for (_, account), memories in zip(accounts, found, strict=True)]
    if states and of_optimizer is not None:
        leaving.append((of_optimizer.states, trip.memories(_states(trip.optimizer), known)))
    storage.refuse_fixed(memory for _, memories in leaving for memory in memories)
    _leave(leaving, trip.devices)

    if isinstance(trip.optimizer, Adam):
        trip.optimizer.set_aside(grads)
    for one, account in accounts:
        account.params_away |= params
        account.grads_away |= grads
        if grads:
            account.grads.set_aside(one.parameters())
        account.guard(one)
    if grads:
        for owner in trip.owners:
            owner.gradients_dropped()
    if params:  # whoever kept a weight for a backward notices
        plain = [p for p in trip.params if not local_shard.is_dtensor(p) and not p.is_inference()]
        torch.autograd.graph.increment_version(plain)
    if states and of_optimizer is not None and trip.optimizer is not None:
        of_optimizer.away = True
        of_optimizer.guard(trip.optimizer)
    _watch_steps()


def _leave(leaving: Sequence[tuple[StorageTransfer, list[Memory]]], devices: Iterable[torch.device]) -> None:
    """All of it or nothing."""
    try:
        for luggage, memories in leaving:
            luggage.pack(memories)
        host_buffer.wait(devices)
        for luggage, _ in leaving:
            luggage.release()
    except BaseException as error:
        for luggage, _ in leaving:
            luggage.take_back()
        host_buffer.wait(devices)
        if isinstance(error, (RuntimeError, MemoryError)):
            nbytes = sum(memory.nbytes for _, memories in leaving for memory in memories)
            raise RuntimeError(f"offload of {nbytes} bytes failed, and nothing has moved: {error}") from error
        raise
    for luggage, _ in leaving:
        luggage.settle()


def onload(
    model: nn.Module | Iterable[nn.Module],
    optimizer: torch.optim.Optimizer | None = None,
    *,
    params: bool = True,
    grads: bool = True,
    states: bool = True,
) -> None:
    """Brings back what `offload` moved: weights and states with the bits that they had, gradients zero.

    Arguments as offload's; what is not away is left alone. Raises RuntimeError, with everything still in host memory,
    where the device has not enough room for all that is asked for.
    """
    trip = _OffloadPlan("onload", model, optimizer)
    accounts, of_optimizer = trip.accounts(), trip.account_of_optimizer()
    coming: list[StorageTransfer] = [account.params for _, account in accounts if params and account.params_away]
    if params:
        trip.refuse_strangers(coming)
    coming += [account.grads for _, account in accounts if grads and account.grads_away]
    if states and of_optimizer is not None and of_optimizer.away:
        coming.append(of_optimizer.states)
    _arrive(coming, trip.devices)

    for one, account in accounts:
        if account.away and (params or grads):
            account.params_away &= not params
            account.grads_away &= not grads
            account.guard(one)
    if grads:
        for owner in trip.owners:
            torch.autograd.graph.increment_version(owner.gradient_memory())
    if states and of_optimizer is not None and trip.optimizer is not None:
        of_optimizer.away = False
        of_optimizer.guard(trip.optimizer)


def _arrive(coming: Sequence[StorageTransfer], devices: Iterable[torch.device]) -> None:
    """All of it or nothing."""
    try:
        for luggage in coming:
            luggage.allocate()
        for luggage in coming:
            luggage.fill()
        host_buffer.wait(devices)
    except BaseException as error:
        nbytes = sum(memory.nbytes for luggage in coming for memory in luggage.memories())
        for luggage in coming:
            luggage.free()
        if isinstance(error, (RuntimeError, MemoryError)):
            raise RuntimeError(
                f"onload of {nbytes} bytes failed, and everything is in host memory still: make room on the device, or "
                f"bring back less at a time (params, grads, states): {error}"
            ) from error
        raise
    for luggage in coming:
        luggage.arrived()


# -- what there is ----------------------------------------------------------------------------------------------------


def _weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from ((f"parameter {name!r}", p) for name, p in model.named_parameters())
    yield from ((f"buffer {name!r}", b) for name, b in model.named_buffers())


def _gradients(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from ((f"the gradient of {name!r}", p.grad) for name, p in model.named_parameters() if p.grad is not None)
    for owner in reducer_registry.owners_of(model.parameters()):
        yield from (("a buffer of gradients", t) for t in owner.gradient_memory())


def _states(optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[str, Tensor]]:
    """Step counters are next to nothing, and loops print them: not those."""
    for entry in [] if optimizer is None else access.entries(optimizer.state):
        for key, value in entry.items():
            if key != "step":
                yield from ((f"state {key!r} of a parameter", t) for t in tree_leaves(value) if isinstance(t, Tensor))


def _reshard(models: Iterable[nn.Module]) -> None:
    """Whole weights that FSDP2 has gathered go, and the modules have their shards again."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        for module in (m for model in models for m in model.modules()):
            if isinstance(module, fsdp.FSDPModule):
                module.reshard()


_watching: object = None


def _watch_steps() -> None:
    """Once per process, from the first offload on: every optimizer's step asks whether anything of it is away."""
    global _watching
    if _watching is None:
        _watching = register_optimizer_step_pre_hook(offload_guard.before_step)
