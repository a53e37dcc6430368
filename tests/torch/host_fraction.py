"""Helpers of the tests of `offload_fraction`: optimizers that step part of their parameters on the host, and the values
to compare."""

from typing import Any

import torch
from torch import Tensor, nn
from training import bits, params_of, policy_of, set_grads

import torch_ext

FRACTIONS = [0.0, 0.5, 1.0]
# Sizes such that the host's part takes several batches; also odd sizes, no elements and one element.
SHAPES = [(130, 137), (130,), (3, 5, 7), (1,), (), (0,), (129,), (4096 * 5,), (9001,), (64, 64)]


def optimizer_of(name: str, fraction: float, shapes: Any = SHAPES, **options: Any) -> torch_ext.AdamW:
    options = {"lr": 1e-2} | options
    return torch_ext.AdamW(params_of(name, shapes), policy=policy_of(name), offload_fraction=fraction, **options)


def params(optimizer: torch_ext.AdamW) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def train(optimizer: torch_ext.AdamW, steps: Any) -> None:
    """Takes a step for each number, with the gradients of `set_grads`."""
    for step in steps:
        set_grads(params(optimizer), step)
        optimizer.step()


def everything(optimizer: torch_ext.AdamW) -> list[Any]:
    """Returns the bits of every weight and of its logical state."""
    state = optimizer.state_dict()["state"]
    logical = [{key: bits(torch.as_tensor(value)) for key, value in state[i].items()} for i in sorted(state)]
    return [bits(p) for p in params(optimizer)], logical


def held(optimizer: torch_ext.AdamW) -> dict[Tensor, dict[str, Tensor]]:
    """Returns the states that the optimizer keeps on the host."""
    return optimizer._states.host._states


@torch.no_grad()
def copy_in(optimizer: torch_ext.AdamW, weights: list[Tensor]) -> None:
    """Copies the weights into the optimizer's parameters."""
    for p, weight in zip(params(optimizer), weights, strict=True):
        p.copy_(weight)
