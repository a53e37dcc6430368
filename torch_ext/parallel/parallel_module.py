"""The class that `parallelize` gives to a model, and the reducer attached to the model."""

import copyreg
import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from torch_ext.parallel.reducer import BucketReducer
from torch_ext.params import local_shard
from torch_ext.policy.policy import Policy

if TYPE_CHECKING:
    from torch_ext.parallel.fsdp.fsdp_reducer import FSDPReducer


class Attached:
    """What `parallelize` attached to a module: the reducer, and the parameters as they were in that call."""

    def __init__(
        self, reducer: "BucketReducer | FSDPReducer", module: torch.nn.Module, strategy: str, policy: Policy
    ) -> None:
        self.reducer, self.strategy, self.policy = reducer, strategy, policy
        # By dict and key, since load_state_dict(assign=True) replaces the parameter there; requires_grad may change.
        self._entries = [
            (owner._parameters, key, param, param.requires_grad)
            for owner in module.modules()
            for key, param in owner._parameters.items()
            if param is not None
        ]

    def check(self, module: torch.nn.Module) -> None:
        """Raises RuntimeError if a parameter was replaced or thawed since `parallelize`, so that no reducer reduces its
        gradient, or if DistributedDataParallel reduces it, too."""
        self._refuse_ddp(module)
        for params, key, param, trainable in self._entries:
            now = params.get(key)
            if now is not None and now is not param and local_shard.is_dtensor(param):
                if not local_shard.is_dtensor(now):
                    continue  # while a unit is unsharded, FSDP2 puts the whole parameter here
                # With an integer reshard_after_forward, FSDP2 leaves a DTensor over that many ranks: reshard it.
                self.reducer.sync_parameters()
                now = params.get(key)
            if (trainable and now is not param) or (not trainable and now is not None and now.requires_grad):
                names = [n for n, p in module.named_parameters(remove_duplicate=False) if p is now] or [key]
                how = "was thawed" if now is param else "is another tensor now (load_state_dict(assign=True)?)"
                raise RuntimeError(
                    f"parameter {names[0]!r} {how}, so its gradient is not reduced: call parallelize again after "
                    "such a change, with optimizer= where an optimizer has state"
                )

    def _refuse_ddp(self, module: torch.nn.Module) -> None:
        """Raises RuntimeError inside the forward of a DistributedDataParallel that has the model's parameters and is
        older than `parallelize`. One that is created later is rejected in torch_patches.py."""
        outer = getattr(DistributedDataParallel, "_active_ddp_module", None)  # whose forward is running
        if outer is None:
            return
        reduced = set(map(id, outer._module_parameters))
        for name, param in module.named_parameters():
            if param.requires_grad and id(param) in reduced:
                raise RuntimeError(
                    f"parameter {name!r} of a model that was parallelized is in DistributedDataParallel, which reduces "
                    "already: leave out parallelize and use torch_ext.register_comm_hook on it, or call the model "
                    "without it"
                )


# Not an attribute of the module: that would be pickled and copied with the module.
_attached: "weakref.WeakKeyDictionary[torch.nn.Module, Attached]" = weakref.WeakKeyDictionary()


class ParallelModule(torch.nn.Module):
    """Base class that `parallelize` adds to a model's class. The class keeps its name; pickle and deepcopy give a model
    of the original class, without a reducer."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        attached = None if torch.compiler.is_compiling() else _attached.get(self)
        if attached is None:
            return super().__call__(*args, **kwargs)
        trains = torch.is_grad_enabled()
        if trains:
            attached.check(self)
        attached.reducer.wait_for_weight_gathers()
        attached.reducer.forwards_running += 1
        try:
            outputs = super().__call__(*args, **kwargs)
        finally:
            attached.reducer.forwards_running -= 1
        if trains and isinstance(attached.reducer, BucketReducer):
            attached.reducer.register_outputs(outputs)
        return outputs

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards inside this context accumulate without reducing; the next one outside reduces everything once.
        Strategies that shard gradients reduce in every backward nevertheless.

        Unlike DistributedDataParallel's, only the backward has to be inside. May be nested with `sync`; the previous
        setting is restored.
        """
        return reducer_of(self).synchronizing(False)

    def sync(self) -> AbstractContextManager[None]:
        """Backwards inside this context reduce, even within `no_sync`. May be nested; restores the previous setting."""
        return reducer_of(self).synchronizing(True)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Like torch's zero_grad; drops the gradient shards, too."""
        attached = _attached.get(self)
        if attached is not None:
            attached.reducer.zero_grad(attached.reducer.params)
        super().zero_grad(set_to_none)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Like torch's state_dict. Under optim and optim_grads its tensors share the weights' memory but have storages
        of their own: a write to them does not change the parameters' version counters."""
        reducer = None if (attached := _attached.get(self)) is None else attached.reducer
        if reducer is not None:
            reducer.wait_for_weight_gathers()
        found = super().state_dict(*args, **kwargs)
        if isinstance(reducer, BucketReducer) and reducer.exchange.weights is not None:
            reducer.exchange.weights.give_own_storages(found)
        return found

    def wire_bytes(self) -> int:
        """Returns the bytes that this rank sent for the current optimizer step, all its micro-batches: gradients, the
        gathered weights, and what the ranks report to each other.

        After step() it is the whole of that step, until the next step's first backward that reduces. It does not matter
        whose optimizer steps; a step that policy.grad_scaler() skips is one, too. Under optim_grads_params the weights
        that were gathered for a forward since the step before count, those of an evaluation as well. Compressed
        messages count as they are sent. 0 before the first backward that reduces. Not included: what FSDP2 itself adds
        up over replicas (HSDP), and what optimizers exchange (norms, Muon's matrices, found_inf).
        """
        return reducer_of(self).wire_bytes

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = super().__reduce_ex__(protocol)
        if isinstance(reduced, str):
            return reduced
        plain = type(self).__bases__[1]
        arguments = tuple(plain if a is type(self) else a for a in reduced[1])
        # pickle rejects copyreg.__newobj__ with another class than the pickled object's; _reconstructor is not checked.
        if reduced[0] is copyreg.__newobj__ and len(arguments) == 1:  # type: ignore[attr-defined]
            return (copyreg._reconstructor, (plain, object, None), *reduced[2:])  # type: ignore[attr-defined]
        return (reduced[0], arguments, *reduced[2:])


_classes: "weakref.WeakKeyDictionary[type, type]" = weakref.WeakKeyDictionary()


def _parallel_class(plain: type) -> type:
    """Returns the parallel subclass of `plain`, always the same one: models of one class stay of one class."""
    made = _classes.get(plain)
    if made is None:
        names = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "__doc__": plain.__doc__}
        made = _classes[plain] = type(plain)(plain.__name__, (ParallelModule, plain), names)
    return made


def attach(model: torch.nn.Module, attached: Attached) -> None:
    """Makes the model use the reducer from now on: in forward, backward, zero_grad and state_dict."""
    if not isinstance(model, ParallelModule):
        model.__class__ = _parallel_class(type(model))
    _attached[model] = attached


def detach(model: torch.nn.Module) -> Attached | None:
    """Removes and returns what an earlier `parallelize` attached, or None: the model has no reducer afterwards."""
    return _attached.pop(model, None)


def attached_to(model: torch.nn.Module) -> Attached | None:
    """Returns what `parallelize` attached; None if the model is not parallelized, or is a copy of one that is."""
    return _attached.get(model)


def reducer_of(model: torch.nn.Module) -> "BucketReducer | FSDPReducer":
    """Returns the model's reducer. Raises RuntimeError if it has none."""
    attached = _attached.get(model)
    if attached is None:
        raise RuntimeError(
            "this model is not parallelized (a copy made by its own class, perhaps): call parallelize on it"
        )
    return attached.reducer


def reducers_in(model: torch.nn.Module) -> "list[BucketReducer | FSDPReducer]":
    """Returns the reducers of the model and of its modules, for those that were parallelized."""
    return [attached.reducer for module in model.modules() if (attached := _attached.get(module)) is not None]


def sync_parameters(chunks: torch.nn.Module | Iterable[torch.nn.Module]) -> bool:
    """Makes the next forward see what was written to the parameters of parallelized models (a load, an average, a
    swap). Call it on every rank after such a write.

    chunks: a model, or its chunks (pipeline stages, say); those that were not parallelized are skipped. Under
    optim_grads_params, unsharded weights that are still in memory are dropped, so that the next forward gathers the
    shards again; under the other strategies nothing can be out of date. Returns whether any chunk was synchronised.
    """
    each = [chunks] if isinstance(chunks, torch.nn.Module) else list(chunks)
    attached = [_attached.get(chunk) for chunk in each]
    return any([one is not None and one.reducer.sync_parameters() for one in attached])  # list: no short circuit
