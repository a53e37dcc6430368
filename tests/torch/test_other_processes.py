"""Optimizers and their state dicts as arguments of a process that is started by spawn or forkserver.
torch.multiprocessing passes their tensors as descriptors of shared memory."""

import copy
import multiprocessing
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from training import POLICIES, everything, params_of, policy_of, train

import torch_ext

BEFORE, AFTER = range(2), range(2, 4)


def matrices() -> torch.optim.Optimizer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 16), nn.Linear(16, 8)).bfloat16()
    return torch_ext.Muon(model.named_parameters(), lr=0.02)


def larger(**options: Any) -> torch.optim.Optimizer:
    """Returns an AdamW of small parameters and of one whose states have memory of their own."""
    shapes = [(130, 37), (5,), (300, 250)]
    return torch_ext.AdamW(params_of("bf16", shapes), lr=0.01, **options)


OPTIMIZERS: dict[str, Callable[[], torch.optim.Optimizer]] = {
    name: lambda name=name: torch_ext.AdamW(params_of(name), lr=0.01, policy=policy_of(name)) for name in POLICIES
} | {
    "large": larger,
    "large, 8bit": lambda: larger(states="8bit"),
    "an average": lambda: larger(ema_decay=0.5, ema_dtype="24bit"),
    "on the host": lambda: larger(offload_fraction=0.5),
    "step_in_backward=True": lambda: larger(step_in_backward=True),
    "Muon": matrices,
}


def goes_on(optimizer: Any, saved: dict[str, Any]) -> tuple[Any, Any]:
    """Takes two steps with a copy of the optimizer, and with one that has loaded its state; returns the weights and
    states of both."""
    mine, other = copy.deepcopy((optimizer, optimizer))[0], copy.deepcopy(optimizer)
    other.state.clear()
    other.load_state_dict(saved)
    train(mine, AFTER)
    train(other, AFTER)
    return everything(mine), everything(other)


def child(sent: list[tuple[Any, dict[str, Any]]], answers: Any) -> None:
    answers.put([goes_on(*each) for each in sent])


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_what_a_process_is_given_goes_on_there_bit_for_bit(method: str) -> None:
    optimizers = {name: make() for name, make in OPTIMIZERS.items()}
    for optimizer in optimizers.values():
        train(optimizer, BEFORE)
    sent = [(optimizer, optimizer.state_dict()) for optimizer in optimizers.values()]
    expected = [goes_on(*copy.deepcopy(each)) for each in sent]
    context: Any = multiprocessing.get_context(method)
    answers = context.Queue()
    process = context.Process(target=child, args=(sent, answers))
    process.start()
    got = answers.get(timeout=120)
    process.join()
    for name, optimizer, a, b in zip(optimizers, optimizers.values(), expected, got, strict=True):
        assert a[0] == a[1] == b[0] == b[1], name
        train(optimizer, AFTER)
        assert everything(optimizer) == a[0], f"{name}, in the process that sent it"
