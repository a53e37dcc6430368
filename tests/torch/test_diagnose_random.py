"""Random models and optimizers with one fault or none: torch_ext.diagnose must report exactly that fault, and its
parameters."""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import their_optimizers as theirs
import torch
from their_optimizers import BF16, FP32, train
from torch import nn

import torch_ext

SEEDS = [*range(144), 173, 312, 373, 424, 589, 594]
"""The last six were found among 4000 seeds: for them infinite moments were also reported as inconsistent."""


class Made(NamedTuple):
    """What a fault is put into: a model and its optimizer, possibly after steps."""

    model: nn.Module
    optimizer: Any
    trained: list[str]
    """Names of the parameters that a step changes."""
    rng: random.Random

    def one(self, least: int = 1) -> str:
        """Returns the name of a random trained parameter with at least that many elements."""
        return self.rng.choice([n for n in self.trained if self.model.get_parameter(n).numel() >= least])

    def leaf(self) -> torch.optim.Optimizer:
        """Returns the torch optimizer that takes the steps."""
        found: torch.optim.Optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        return found

    def state_of(self, name: str) -> dict[str, Any]:
        leaf = self.leaf()
        stepped = [p for group in leaf.param_groups for p in group["params"]]
        return leaf.state[stepped[self.trained.index(name)]]  # type: ignore[no-any-return]


def random_model(rng: random.Random, dtype: torch.dtype) -> nn.Module:
    """Returns an embedding and layers of random sizes; in some models a layer is frozen."""
    torch.manual_seed(rng.randrange(1 << 30))
    width = rng.randrange(3, 20)
    layers: list[nn.Module] = [nn.Embedding(rng.randrange(5, 30), width)]
    for _ in range(rng.randrange(1, 4)):
        wider = rng.randrange(2, 20)
        layers += [nn.Linear(width, wider, bias=rng.random() < 0.7), nn.LayerNorm(wider)]
        width = wider
    model = nn.Sequential(*layers).to(dtype)
    if rng.random() < 0.3:
        model[1].requires_grad_(False)
    return model


# name -> dtype of the model, and a function that creates the optimizer from parameters and lr
Make = Callable[[Any, float], Any]
HOW: dict[str, tuple[torch.dtype, Make]] = {
    "torch AdamW": (FP32, lambda ps, lr: torch.optim.AdamW(ps, lr=lr)),
    "torch Adam": (FP32, lambda ps, lr: torch.optim.Adam(ps, lr=lr, betas=(0.8, 0.99), weight_decay=0.1)),
    "fused, fp32": (FP32, lambda ps, lr: theirs.FusedAdam(ps, lr=lr)),
    "fused, masters": (BF16, lambda ps, lr: theirs.FusedAdam(ps, lr=lr, master_weights=True)),
    "Megatron": (BF16, lambda ps, lr: theirs.Float16Optimizer(torch.optim.AdamW(ps, lr=lr))),
    "Megatron, fp16": (torch.float16, lambda ps, lr: theirs.Float16Optimizer(torch.optim.AdamW(ps, lr=lr))),
    "ours": (BF16, lambda ps, lr: torch_ext.AdamW(ps, lr=lr)),
    "by hand": (BF16, lambda ps, lr: torch.optim.AdamW([nn.Parameter(p.detach().float()) for p in ps], lr=lr)),
}
STEPS = {"by hand": 0}


def made(rng: random.Random, how: str, without: bool = False) -> tuple[Made, str]:
    """Returns a random model and optimizer. without=True leaves one parameter out of the optimizer and returns its
    name."""
    dtype, make = HOW[how]
    model = random_model(rng, dtype)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    left = rng.choice(names) if without else ""
    trained = [name for name in names if name != left]
    optimizer = make([model.get_parameter(name) for name in trained], 10 ** rng.uniform(-5, -3))
    if how != "by hand":
        train(model, optimizer, rng.randrange(1, 4), seed=rng.randrange(1 << 30))
    return Made(model, optimizer, trained, rng), left


TORCH = ["torch AdamW", "torch Adam"]
MOMENTS = [*TORCH, "fused, fp32", "fused, masters", "Megatron", "Megatron, fp16"]
WITH_MASTERS = ["fused, masters", "Megatron", "Megatron, fp16", "by hand"]


# Each function returns a model and optimizer with the fault that it is named after, and the names of the faulty
# parameters.
def none(rng: random.Random) -> tuple[Made, set[str]]:
    return made(rng, rng.choice(list(HOW)))[0], set()


def in_no_group(rng: random.Random) -> tuple[Made, set[str]]:
    whole, left = made(rng, rng.choice([how for how in HOW if how != "by hand"]), without=True)
    return whole, {left}


def in_two_groups(rng: random.Random) -> tuple[Made, set[str]]:
    whole, _ = made(rng, rng.choice([*TORCH, "fused, fp32", "fused, masters"]))
    name = whole.one()
    group = whole.optimizer.param_groups[0]
    whole.optimizer.param_groups.append({**group, "params": [whole.model.get_parameter(name)]})
    return whole, {name}


def stale_references(rng: random.Random) -> tuple[Made, set[str]]:
    """A parameter of the model is replaced by its copy."""
    whole, _ = made(rng, rng.choice([*TORCH, "fused, fp32"]))
    module, _, parameter = whole.one().rpartition(".")
    owner = whole.model.get_submodule(module)
    setattr(owner, parameter, nn.Parameter(getattr(owner, parameter).detach().clone()))
    return whole, {f"{module}.{parameter}"}


def stale_masters(rng: random.Random) -> tuple[Made, set[str]]:
    whole, _ = made(rng, rng.choice(WITH_MASTERS))
    name = whole.one()
    p = whole.model.get_parameter(name).data.view(-1)
    p[rng.randrange(p.numel())] += 0.5
    return whole, {name}


def lost_updates(rng: random.Random) -> tuple[Made, set[str]]:
    model = random_model(rng, BF16)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    with torch.no_grad():
        for name in trained:
            model.get_parameter(name).add_(1)
    optimizer = torch.optim.AdamW((model.get_parameter(n) for n in trained), lr=1e-6, betas=(0.9, 0.95))
    train(model, optimizer, rng.randrange(0, 3))
    return Made(model, optimizer, trained, rng), set(trained)


def stalled_exp_avg_sq(rng: random.Random) -> tuple[Made, set[str]]:
    model = random_model(rng, FP32)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    beta2 = 1 - 10 ** rng.uniform(-5, -3)
    params = [model.get_parameter(n) for n in trained]
    optimizer = theirs.FusedAdam(params, lr=1e-3, betas=(0.9, beta2), exp_avg_sq_dtype=BF16)
    train(model, optimizer, rng.randrange(0, 3))
    return Made(model, optimizer, trained, rng), set(trained)


def upcast_missing(rng: random.Random) -> tuple[Made, set[str]]:
    """One moment is in bf16, where fp32 was asked for."""
    whole, _ = made(rng, rng.choice(["fused, fp32", "fused, masters"]))
    name = whole.one()
    state = whole.state_of(name)
    state["exp_avg"] = state["exp_avg"].to(BF16)
    return whole, {name}


def missing_moments(rng: random.Random) -> tuple[Made, set[str]]:
    whole, _ = made(rng, rng.choice(MOMENTS))
    name = whole.one()
    del whole.state_of(name)[rng.choice(["exp_avg", "exp_avg_sq"])]
    return whole, {name}


def misshapen_moments(rng: random.Random) -> tuple[Made, set[str]]:
    whole, _ = made(rng, rng.choice(MOMENTS))
    name = whole.one()
    state, key = whole.state_of(name), rng.choice(["exp_avg", "exp_avg_sq"])
    state[key] = torch.cat([state[key].reshape(-1), torch.zeros(1)])
    return whole, {name}


def inconsistent_moments(rng: random.Random) -> tuple[Made, set[str]]:
    whole, _ = made(rng, rng.choice(MOMENTS))
    name = whole.one()
    state = whole.state_of(name)
    if "step" in state and rng.random() < 0.5:
        state["step"] = torch.tensor(0.0)
    else:
        state["exp_avg_sq"].zero_()
    return whole, {name}


def nonfinite_state(rng: random.Random) -> tuple[Made, set[str]]:
    whole, _ = made(rng, rng.choice(MOMENTS))
    name = whole.one()
    value = whole.state_of(name)[rng.choice(["exp_avg", "exp_avg_sq"])].view(-1)
    value[rng.randrange(value.numel())] = rng.choice([float("nan"), float("inf")])
    return whole, {name}


def no_state(rng: random.Random) -> tuple[Made, set[str]]:
    whole, _ = made(rng, rng.choice(["torch AdamW", "torch Adam"]))
    name = whole.one()
    del whole.optimizer.state[whole.model.get_parameter(name)]
    return whole, {name}


FAULTS = [
    *(in_no_group, in_two_groups, stale_references, stale_masters, lost_updates, stalled_exp_avg_sq, upcast_missing),
    *(missing_moments, misshapen_moments, inconsistent_moments, nonfinite_state, no_state),
]


@pytest.mark.parametrize("begin", range(0, len(SEEDS), 25))
def test_the_injected_fault_is_named_and_no_other(begin: int) -> None:
    for seed in SEEDS[begin : begin + 25]:
        rng = random.Random(seed)
        fault = rng.choice(FAULTS) if rng.random() < 0.8 else none
        whole, where = fault(rng)
        report = torch_ext.diagnose(whole.model, whole.optimizer)
        serious = [f for f in report.findings if f.severity != "note"]
        wanted = {fault.__name__} if fault is not none else set()
        assert {f.kind for f in serious} == wanted, f"seed {seed}, {fault.__name__}: {report}"
        assert {name for f in serious for name in f.names} == where, f"seed {seed}, {fault.__name__}: {report}"
