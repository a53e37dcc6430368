"""Hooks that turn a use of what is away into an error. They are there only as long as it is away."""

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from torch_ext.params import local_shard
from torch_ext.tensors import offload_guard


def _forward(module: nn.Module, _inputs: Any) -> NoReturn:
    _refuse(module, "forward")


def _saving(module: nn.Module, *_: Any) -> NoReturn:
    _refuse(module, "state_dict()")


def _loading(module: nn.Module, *_: Any) -> NoReturn:
    _refuse(module, "load_state_dict()")


def _refuse(module: nn.Module, doing: str) -> NoReturn:
    raise RuntimeError(
        f"{doing} of {type(module).__name__}: its weights are in host memory since offload(); {offload_guard.REMEDY}"
    )


def _gradient(_grad: Tensor) -> NoReturn:
    raise RuntimeError(f"backward: weights or gradients are in host memory since offload(); {offload_guard.REMEDY}")


def _saving_states(optimizer: torch.optim.Optimizer) -> None:
    offload_guard.refuse_states(optimizer, "state_dict()")


def _loading_states(optimizer: torch.optim.Optimizer, _state_dict: Any) -> None:
    offload_guard.refuse_states(optimizer, "load_state_dict()")


def of_modules(guards: ExitStack, modules: Iterable[nn.Module]) -> None:
    """Nobody computes with their weights, saves or loads them."""
    for module in modules:
        # First, before FSDP2 gathers weights.
        guards.callback(module.register_forward_pre_hook(_forward, prepend=True).remove)
        guards.callback(module.register_state_dict_pre_hook(_saving).remove)
        guards.callback(module.register_load_state_dict_pre_hook(_loading).remove)


def of_gradients(guards: ExitStack, params: Iterable[Tensor]) -> None:
    """Nobody accumulates gradients of these. (Those of DTensors come through FSDP2, whose engine sees to it.)"""
    for p in params:
        if p.requires_grad and not local_shard.is_dtensor(p):
            guards.callback(p.register_hook(_gradient).remove)


def of_optimizer(guards: ExitStack, optimizer: torch.optim.Optimizer) -> None:
    """Nobody saves its states or loads others; steps are `offload_guard.before_step`'s."""
    guards.callback(optimizer.register_state_dict_pre_hook(_saving_states).remove)
    guards.callback(optimizer.register_load_state_dict_pre_hook(_loading_states).remove)
