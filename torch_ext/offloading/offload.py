"""`offload` and `onload`, which move weights, gradients and optimizer states out of the device's memory, and back.

They move storages, not tensors: a storage is resized to 0 bytes, and later to its previous size. So parameters, views
of flat buffers and all other tensors in the storage stay the same objects.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from torch_ext.native.completion import complete
from torch_ext.offloading import hooks, transfer
from torch_ext.offloading.transfer import Move, Offloaded, Released, StorageTransfer
from torch_ext.optim.adamw import Adam
from torch_ext.optim.state import access
from torch_ext.parallel import parallel_module
from torch_ext.params import local_shard, reducer_registry
from torch_ext.params.param_groups import innermost
from torch_ext.tensors import storage
from torch_ext.tensors.storage import Memory

Models: TypeAlias = nn.Module | Iterable[nn.Module]
Owner: TypeAlias = nn.Module | torch.optim.Optimizer

_HOST = ("cpu", "meta")  # device types that are no accelerators


def offload(
    model: Models,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    params: bool = True,
    grads: bool = True,
    states: bool = True,
) -> None:
    """Moves weights, gradients and optimizer states out of the device's memory until `onload`. Call it between steps.

    model: a module, parallelized or not, or several (the chunks of a pipeline, models with tied weights). If training
        calls the result of torch.compile, pass that. Its weights are all parameters, frozen ones included, and buffers.
    optimizer: an optimizer of torch_ext or any torch.optim.Optimizer, also in a framework's wrapper; may be without
        state, or None.
    params: copies weights to host memory.
    grads: frees gradients. `.grad` is None until onload, which restores the same tensors, filled with zeros. Gradient
        buffers and shards of a parallelized model are freed, too, but not DistributedDataParallel's own buffers.
    states: copies the optimizer's states, masters included, to host memory. Step counters stay where they are;
        offload_fraction's states are on the host already.

    Host memory is allocated once, pinned if the device is an accelerator, and kept for the next call, as long as model
    and optimizer exist. Without an accelerator, host memory stands in for the device's and the same code runs. Tensors
    stay the same objects, with the same shapes, strides and views. Their addresses change, so a captured CUDA graph
    becomes invalid. torch.cuda.empty_cache() gives the freed memory to other processes. Not collective: each rank moves
    its own tensors.

    What is already offloaded stays so; each kind may be moved alone. While something is offloaded, whatever needs it
    raises RuntimeError, naming `onload`: forward, backward, step, clip, copy or pickle of the model, saving and loading
    by state_dict. Other code must not touch these tensors, not even in a state_dict from before: reading one crashes
    the process. Autograd graphs from before cannot be backpropagated any more, not even after onload.

    Raises RuntimeError, with nothing changed, during a forward, a backward or a gradient exchange; between a backward
    that stepped parameters and step(); within master_weights(); for memory that torch does not own alone (`.numpy()`,
    share_memory_(), a mapped file, a state_dict of a model with flat buffers that still exists); and if there is not
    enough host memory.
    """
    _alone("offload()", optimizer, _offload, model, {"params": params, "grads": grads, "states": states})


def _alone(doing: str, optimizer: torch.optim.Optimizer | None, call: Callable[..., None], *args: Any) -> None:
    """Calls call(optimizer, *args), and raises RuntimeError while another call writes to the optimizer."""
    inner = _optimizer_of(optimizer)
    if isinstance(inner, Adam):
        inner.writing_calls.run(doing, call, optimizer, *args)
    else:
        call(optimizer, *args)


def _offload(optimizer: torch.optim.Optimizer | None, model: Models, kinds: dict[str, bool]) -> None:
    plan = OffloadPlan("offload", model, optimizer, kinds)
    plan.refuse_shared_weights()
    moves = plan.moves()
    storage.refuse_fixed(memory for _, memories in moves for memory in memories)
    try:
        transfer.offload_all(moves, plan.devices, plan.refuse_use)
        plan.finish_offload()
    except BaseException:
        if transfer.are_offloaded(moves):  # an interrupt after everything was moved
            plan.finish_offload()
        else:
            complete(plan.allow_use)
        raise


def onload(
    model: Models,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    params: bool = True,
    grads: bool = True,
    states: bool = True,
) -> None:
    """Moves back what `offload` moved: weights and states bit for bit, gradients as zeros.

    model, optimizer, params, grads, states: as for offload. What is not offloaded is left alone.

    Raises RuntimeError, with everything still in host memory, if the device has not enough memory for all of it.
    """
    _alone("onload()", optimizer, _onload, model, {"params": params, "grads": grads, "states": states})


def _onload(optimizer: torch.optim.Optimizer | None, model: Models, kinds: dict[str, bool]) -> None:
    plan = OffloadPlan("onload", model, optimizer, kinds)
    if kinds["params"]:
        plan.refuse_shared_weights()
    transfers = plan.offloaded()
    transfer.onload_all(transfers, plan.devices)
    complete(lambda: plan.finish_onload(transfers))


class _Record:
    """The offloaded kinds and storages of one model or optimizer, and the hooks that raise if it is used meanwhile."""

    def __init__(self, owner: Owner, pinned: bool) -> None:
        self.pinned, self.grads = pinned, Released()
        self.transfers: dict[str, StorageTransfer] = (
            {"params": Offloaded(pinned), "grads": self.grads}
            if isinstance(owner, nn.Module)
            else {"states": Offloaded(pinned)}
        )
        self.offloaded: set[str] = set()
        self._hooks = ExitStack()
        self._refusals = hooks.Refusals()

    def hook(self, owner: Owner) -> None:
        """Replaces the hooks by hooks for the kinds that are offloaded now."""
        self._refusals.withdrawn = True
        self._hooks.close()
        hooks.forget(owner)
        self._refusals = hooks.Refusals()
        hooks.install(self._hooks, owner, self.offloaded, self._refusals)


_records: "weakref.WeakKeyDictionary[Owner, _Record]" = weakref.WeakKeyDictionary()


def _record_of(owner: Owner, pinned: bool) -> _Record:
    record = _records.get(owner)
    if record is None or (record.pinned != pinned and not record.offloaded):
        record = _records[owner] = _Record(owner, pinned)
    return record


class OffloadPlan:
    """One call of `offload` or `onload`: models, optimizer, and the kinds of memory to move ("params", "grads",
    "states")."""

    def __init__(
        self, doing: str, model: Models, optimizer: torch.optim.Optimizer | None, kinds: dict[str, bool]
    ) -> None:
        """doing: "offload" or "onload". Raises RuntimeError if the memory is in use."""
        self._doing, self._kinds = doing, {kind for kind, wanted in kinds.items() if wanted}
        self._models, self._optimizer = _models_of(model), _optimizer_of(optimizer)
        self._refuse_in_use()
        _reshard(self._models)
        self._weights = [named for one in self._models for named in _tensors_of(one, "params")]
        self._params = [p for one in self._models for p in one.parameters()]
        self._reducers = list(reducer_registry.owners_of(self._params))
        self._refuse_parts()
        owners: list[Owner] = [*self._models, *([] if self._optimizer is None else [self._optimizer])]
        states = [] if self._optimizer is None else _tensors_of(self._optimizer, "states")
        self.devices = {t.device for _, t in (*self._weights, *states) if t.device.type not in _HOST}
        self._records = [(owner, _record_of(owner, pinned=bool(self.devices))) for owner in owners]
        self._refused = False
        self._offloaded_before = [set(record.offloaded) for _, record in self._records]

    def _refuse_in_use(self) -> None:
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(f"{self._doing} during a backward: call it between steps")
        for one in self._models:
            for reducer in parallel_module.reducers_in(one):
                reducer.refuse_moving(self._doing, self._doing == "offload" and "params" in self._kinds)
        if isinstance(self._optimizer, Adam):
            self._optimizer.refuse_moving(self._doing)

    def _refuse_parts(self) -> None:
        own = {id(p) for p in self._params}
        if any(id(p) not in own for reducer in self._reducers for p in reducer.params):
            raise RuntimeError(
                f"{self._doing} of a submodule of a parallelized model, whose parameters share flat buffers with the "
                "rest of it: pass the whole model"
            )

    def refuse_shared_weights(self) -> None:
        """Raises RuntimeError if weights were offloaded together with another model that is not in this call."""
        transfers = [record.transfers["params"] for _, record in self._records if "params" in record.transfers]
        known = {id(piece.memory.storage) for one in transfers for piece in one.pieces}
        for name, weight in self._weights:
            for t in storage.unwrapped(weight):
                if storage.is_released(t) and id(t.untyped_storage()) not in known:
                    raise RuntimeError(
                        f"{self._doing}: {name} was offloaded with another model that has this weight too: pass both "
                        "models in one call, as a list"
                    )

    def moves(self) -> list[Move]:
        """Returns the memory to offload. Memory of two kinds counts as the first of params, grads and states."""
        host_tensors = self._optimizer.host_tensors() if isinstance(self._optimizer, Adam) else ()
        known = set(storage.memories_of(("", t) for t in host_tensors))
        moves: list[Move] = []
        for kind in ("params", "grads", "states"):
            for owner, record in self._records:
                if kind in record.transfers:
                    memories = self._new_memories(_tensors_of(owner, kind), known)
                    if kind in self._kinds:
                        moves.append((record.transfers[kind], memories))
        return moves

    def _new_memories(self, named: Iterable[tuple[str, Tensor]], known: set[int]) -> list[Memory]:
        """Returns the memories of these tensors whose addresses are not in `known`, and adds the addresses. With an
        accelerator, storages in host memory are left out: they do not move."""
        new = {address: m for address, m in storage.memories_of(named).items() if address not in known}
        known.update(new)
        return [m for m in new.values() if not self.devices or m.storage.device.type != "cpu"]

    def offloaded(self) -> list[StorageTransfer]:
        """Returns the storages to bring back."""
        return [
            transfer
            for _, record in self._records
            for kind, transfer in record.transfers.items()
            if kind in self._kinds & record.offloaded
        ]

    def refuse_use(self) -> None:
        """Installs the hooks that raise on use. Called before memory is freed: a signal handler, for example, may try
        to save it at any time."""
        for owner, record in self._records:
            record.offloaded |= self._kinds & record.transfers.keys()
            record.hook(owner)
        self._refused = True

    def allow_use(self) -> None:
        """Undoes `refuse_use` after an error: what was not offloaded before may be used again. May be called again."""
        self._refused = False
        for (owner, record), before in zip(self._records, self._offloaded_before, strict=True):
            record.offloaded = set(before)
            record.hook(owner)

    def finish_offload(self) -> None:
        """Tells optimizer, parameters and reducers that the memory has been freed. May be called again."""
        if isinstance(self._optimizer, Adam):
            self._optimizer.memory_released("grads" in self._kinds)
        for owner, record in self._records:
            if "grads" in self._kinds and isinstance(owner, nn.Module):
                record.grads.hide_grads(owner.parameters())
        if not self._refused:
            self.refuse_use()
        if "grads" in self._kinds:
            for reducer in self._reducers:
                reducer.gradients_released()
        if "params" in self._kinds:  # autograd then raises for graphs that saved a weight for their backward
            plain = [p for p in self._params if not local_shard.is_dtensor(p) and not p.is_inference()]
            torch.autograd.graph.increment_version(plain)
        self._tell_weights_moved(offloaded=True)

    def finish_onload(self, transfers: Iterable[StorageTransfer]) -> None:
        """Allows the use of the memory, which has its content again. May be called again."""
        for one in transfers:
            one.finish()
        for owner, record in self._records:
            record.offloaded -= self._kinds
            record.hook(owner)
        if "grads" in self._kinds:
            for reducer in self._reducers:
                torch.autograd.graph.increment_version(reducer.gradient_memory())
        self._tell_weights_moved(offloaded=False)

    def _tell_weights_moved(self, offloaded: bool) -> None:
        if "params" in self._kinds and isinstance(self._optimizer, Adam):
            self._optimizer.weights_moved(self._params, offloaded)


def _models_of(model: Models) -> list[nn.Module]:
    models = list(model) if isinstance(model, Iterable) and not isinstance(model, nn.Module) else [model]
    for one in models:
        if not isinstance(one, nn.Module):
            raise TypeError(f"model is, or contains, a {type(one).__name__}; a torch.nn.Module, or several, is legal")
    return models


def _optimizer_of(optimizer: torch.optim.Optimizer | None) -> torch.optim.Optimizer | None:
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}; a torch.optim.Optimizer or None is legal")
    return None if optimizer is None else innermost(optimizer)


def _tensors_of(owner: Owner, kind: str) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a kind with names for messages. States are without step counters, which are tiny and which
    training loops print."""
    if isinstance(owner, torch.optim.Optimizer):
        for entry in access.entries(owner.state):
            for key, value in entry.items():
                leaves = tree_leaves(value) if key != "step" else []
                yield from ((f"state {key!r} of a parameter", t) for t in leaves if isinstance(t, Tensor))
    elif kind == "params":
        yield from ((f"parameter {name!r}", p) for name, p in owner.named_parameters())
        yield from ((f"buffer {name!r}", b) for name, b in owner.named_buffers())
    else:
        yield from ((f"the gradient of {name!r}", p.grad) for name, p in owner.named_parameters() if p.grad is not None)
        for reducer in reducer_registry.owners_of(owner.parameters()):
            yield from (("a buffer of gradients", t) for t in reducer.gradient_memory())


def _reshard(models: Iterable[nn.Module]) -> None:
    """Frees the unsharded weights that FSDP2 has all-gathered; modules have their shards again."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    ours: set[nn.Module] = set()  # modules that sync_parameters has resharded, even after a forward that raised
    for module in (m for model in models for m in model.modules()):
        if parallel_module.sync_parameters(module):
            ours.update(module.modules())
        elif isinstance(module, fsdp.FSDPModule) and module not in ours:
            module.reshard()
