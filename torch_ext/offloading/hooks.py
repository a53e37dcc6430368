"""Hooks that turn a use of what is offloaded into an error. All but one are there only as long as it is offloaded."""

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torch_ext.params import local_shard
from torch_ext.tensors import offload_guard

_COPIES = "__reduce_ex__"  # what pickle and copy.deepcopy ask an object, not its class, for


class Refusals:
    """What the hooks of one `install` ask before they refuse: an interrupt may keep some of them from being removed."""

    withdrawn = False


def install(
    hooks: ExitStack, owner: nn.Module | torch.optim.Optimizer, offloaded: set[str], refusals: Refusals
) -> None:
    """offloaded: "params" and "grads" of a model, "states" of an optimizer; may be empty. Closing `hooks` removes what
    was installed before."""
    if offloaded:
        _refuse_steps()
    if isinstance(owner, torch.optim.Optimizer):
        _install_on_optimizer(hooks, owner, bool(offloaded))
    elif offloaded:
        _install_on_model(hooks, owner, offloaded, refusals)


def forget(owner: nn.Module | torch.optim.Optimizer) -> None:
    """Takes back what asks no `Refusals`, where an interrupt kept the closing of `hooks` from doing so."""
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
        offload_guard.optimizers.discard(optimizer)  # a callback of `hooks` would keep it alive
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
            # First, before FSDP2 gathers weights.
            hooks.callback(module.register_forward_pre_hook(refuse("forward"), prepend=True).remove)
            hooks.callback(module.register_state_dict_pre_hook(refuse("state_dict()")).remove)
            hooks.callback(module.register_load_state_dict_pre_hook(refuse("load_state_dict()")).remove)
            # Before the class's, which would have torch read weights that are not there.
            module.__dict__[_COPIES] = functools.partial(_refuse, "a copy or pickle", type(module).__name__)
            hooks.callback(module.__dict__.pop, _COPIES, None)
    for p in model.parameters():
        if p.requires_grad and not local_shard.is_dtensor(p):  # those of DTensors FSDPReducer refuses
            hooks.callback(p.register_hook(functools.partial(_refuse_gradient, refusals)).remove)


@functools.cache
def _refuse_steps() -> None:
    """For good, and of every optimizer: other ones than those that were offloaded have the same parameters."""
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
