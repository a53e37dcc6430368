"""Models under torch.compile: the optimizer trains them to the bits of eager models, parameters keep their names, and
states load from compiled into eager models and back."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from training import POLICIES, everything

import torch_ext

STEPS = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.relu(self.up(x)))


def network(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), Block(), Block(), nn.Linear(16, 1)).to(dtype)


def whole(model: nn.Module) -> Any:
    return torch.compile(model, backend="aot_eager", fullgraph=True)


def in_place(model: nn.Module) -> Any:
    model.compile(backend="aot_eager", fullgraph=True)
    return model


def per_block(model: Any) -> Any:
    for i in (1, 2):
        model[i] = torch.compile(model[i], backend="aot_eager", fullgraph=True)
    return model


# how the model is compiled -> the function that does it, and a prefix that its parameters' names get
WAYS: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "whole": (whole, "_orig_mod."),
    "in place": (in_place, ""),
    "per block": (per_block, "1._orig_mod."),
}


def train(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
    dtype = next(model.parameters()).dtype
    for step in steps:
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
        (model(x.to(dtype))[:, 0].float() - x.abs().sum(1)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


def optimizer_of(model: nn.Module, name: str) -> torch_ext.AdamW:
    policy = torch_ext.load_policy(model, override_optimizer_config=POLICIES[name][1])
    return torch_ext.AdamW(model.named_parameters(), lr=1e-2, policy=policy)


@pytest.mark.parametrize("name", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("way", WAYS)
def test_compiled_models_train_as_eager_ones_and_resume(way: str, name: str) -> None:
    """The thresholds of dithered moments depend on parameter names, so the names must be recognized as equal."""
    torch._dynamo.reset()
    compiling, prefix = WAYS[way]
    eager = network(POLICIES[name][0])
    reference = optimizer_of(eager, name)
    train(eager, reference, range(STEPS))

    model = compiling(network(POLICIES[name][0]))
    assert any(key.startswith(prefix) for key in model.state_dict())
    optimizer = optimizer_of(model, name)
    train(model, optimizer, range(STEPS // 2))
    saved = copy.deepcopy((optimizer.state_dict(), model.state_dict()))
    train(model, optimizer, range(STEPS // 2, STEPS))
    assert everything(optimizer) == everything(reference)

    later = compiling(network(POLICIES[name][0]))
    resumed = optimizer_of(later, name)
    resumed.load_state_dict(saved[0])
    later.load_state_dict(saved[1])
    train(later, resumed, range(STEPS // 2, STEPS))
    assert everything(resumed) == everything(reference)


@pytest.mark.parametrize("way", ["whole", "per block"])
def test_state_of_a_compiled_model_goes_on_in_an_eager_one_and_back(way: str) -> None:
    torch._dynamo.reset()
    compiling, _ = WAYS[way]
    runs = []
    for first, second in ((network, network), (network, compiling), (compiling, network)):
        model = first(torch.bfloat16) if first is network else first(network(torch.bfloat16))
        optimizer = optimizer_of(model, "8bit")
        train(model, optimizer, range(2))
        plain = network(torch.bfloat16)
        with torch.no_grad():
            for p, q in zip(plain.parameters(), model.parameters(), strict=True):
                p.copy_(q)
        later = plain if second is network else second(plain)
        resumed = optimizer_of(later, "8bit")
        resumed.load_state_dict(optimizer.state_dict())
        train(later, resumed, range(2, STEPS))
        runs.append(everything(resumed))
    assert runs[0] == runs[1] == runs[2]


def test_inductor_trains_what_eager_trains() -> None:
    torch._dynamo.reset()
    losses = []
    for compiling in (lambda model: model, lambda model: torch.compile(model, fullgraph=True)):
        model = compiling(network(torch.bfloat16))
        optimizer = torch_ext.AdamW(model.named_parameters(), lr=1e-2)
        train(model, optimizer, range(8))
        x = torch.randn(64, 8, generator=torch.Generator().manual_seed(99))
        with torch.no_grad():
            losses.append(float((model(x.bfloat16())[:, 0].float() - x.abs().sum(1)).square().mean()))
    assert math.isclose(*losses, rel_tol=0.02), losses


def test_loop_with_the_step_in_it_compiles_around_the_step() -> None:
    """step() runs uncompiled (torch.compiler.disable); the code around it is compiled, and the bits are the same."""
    torch._dynamo.reset()
    results = []
    for compiled in (False, True):
        model = network(torch.bfloat16)
        optimizer = torch_ext.AdamW(model.named_parameters(), lr=1e-2)

        def step(x: torch.Tensor, model: Any = model, optimizer: Any = optimizer) -> torch.Tensor:
            loss = (model(x.bfloat16())[:, 0].float() - x.abs().sum(1)).square().mean()
            loss.backward()
            torch_ext.clip_grad_norm_(optimizer, 0.5)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        chosen = torch.compile(step, backend="aot_eager") if compiled else step
        for i in range(STEPS):
            chosen(torch.randn(8, 8, generator=torch.Generator().manual_seed(i)))
        results.append(everything(optimizer))
    assert results[0] == results[1]
