"""Hooks that raise RuntimeError when offloaded memory is used. All but one exist only while something is offloaded."""

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torch_ext.params import local_shard
from torch_ext.tensors import offload_guard

_COPIES = "__reduce_ex__"  # pickle and copy.deepcopy look this method up on the object, not on its class


class Refusals:
    """A switch that the hooks of one `install` check before they raise. An interrupt may prevent the removal of some
    hooks; `withdrawn` then disables them."""

    withdrawn = False


def install(
    hooks: ExitStack, owner: nn.Module | torch.optim.Optimizer, offloaded: set[str], refusals: Refusals
) -> None:
    """Installs the hooks for one model or optimizer.

    hooks: gets the callbacks that remove the hooks. offloaded: the offloaded kinds, "params" and "grads" of a model or
    "states" of an optimizer; may be empty."""
    if offloaded:
        offload_guard.begin()
        _refuse_steps()
    if isinstance(owner, torch.optim.Optimizer):
        _install_on_optimizer(hooks, owner, bool(offloaded))
    elif offloaded:
        _install_on_model(hooks, owner, offloaded, refusals)


def forget(owner: nn.Module | torch.optim.Optimizer) -> None:
    """Removes what does not check `Refusals`, in case an interrupt prevented the closing of `hooks` from doing so."""
    if isinstance(owner, torch.optim.Optimizer):
        offload_guard.optimizers.discard(owner)
        return
    for p in owner.parameters():
        offload_guard.params.pop(p, None)
        offload_guard.grads.pop(p, None)
    for module in owner.modules():
        module.__dict__.pop(_COPIES, None)


def _install_on_optimizer(hooks: ExitStack, optimizer: torch.optim.Optimizer, offloaded: bool) -> None:
    if not offloaded:
        offload_guard.optimizers.discard(optimizer)  # not by a callback of `hooks`, which would keep it alive
        return
    offload_guard.optimizers.add(optimizer)
    hooks.callback(optimizer.register_state_dict_pre_hook(_refuse_states("state_dict()")).remove)
    hooks.callback(optimizer.register_load_state_dict_pre_hook(_refuse_states("load_state_dict()")).remove)


def _install_on_model(hooks: ExitStack, model: nn.Module, offloaded: set[str], refusals: Refusals) -> None:
    refuse = functools.partial(_refuse_module, refusals)
    for kind, names in (("params", offload_guard.params), ("grads", offload_guard.grads)):
        if kind in offloaded:
            for name, p in model.named_parameters():
                names[p] = name
                hooks.callback(names.pop, p, None)
    if "params" in offloaded:
        for module in model.modules():
            # prepend: before FSDP2's hook, which would all-gather weights.
            hooks.callback(module.register_forward_pre_hook(refuse("forward"), prepend=True).remove)
            hooks.callback(module.register_state_dict_pre_hook(refuse("state_dict()")).remove)
            hooks.callback(module.register_load_state_dict_pre_hook(refuse("load_state_dict()")).remove)
            # Hides the class's method, with which torch would read the missing weights.
            module.__dict__[_COPIES] = functools.partial(_refuse, "a copy or pickle", type(module).__name__)
            hooks.callback(module.__dict__.pop, _COPIES, None)
    for p in model.parameters():
        if p.requires_grad and not local_shard.is_dtensor(p):  # for DTensors, FSDPReducer raises
            hooks.callback(p.register_hook(functools.partial(_refuse_gradient, refusals)).remove)


@functools.cache
def _refuse_steps() -> None:
    """Installs, permanently and for every optimizer, the hook that raises in step(): any optimizer may have parameters
    whose weights or gradients are offloaded."""
    register_optimizer_step_pre_hook(_refuse_step)


def _refuse_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    offload_guard.refuse_states(optimizer, "step()")
    offload_guard.refuse_gradients((p for group in optimizer.param_groups for p in group["params"]), "step()")


def _refuse_states(doing: str) -> Callable[..., None]:
    return lambda optimizer, *_: offload_guard.refuse_states(optimizer, doing)


def _refuse_module(refusals: Refusals, doing: str) -> Callable[..., None]:
    def refuse(module: nn.Module, *_: object) -> None:
        if not refusals.withdrawn:
            _refuse(doing, type(module).__name__)

    return refuse


def _refuse(doing: str, name: str, *_: object) -> NoReturn:
    raise RuntimeError(f"{doing} of {name}: its weights are offloaded; {offload_guard.REMEDY}")


def _refuse_gradient(refusals: Refusals, _grad: Tensor) -> None:
    if not refusals.withdrawn:
        raise RuntimeError(f"backward: weights or gradients are offloaded; {offload_guard.REMEDY}")
