"""What a step takes from the groups is what is in them now, whatever was edited: an optimizer that keeps its table of
hyper-parameters from step to step does what a copy of it does, which has none yet."""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torch_ext

LRS: list[Any] = [0.0, 0.5, 1, True, torch.tensor(0.25), torch.tensor(1e-3, dtype=torch.float64)]
ILLEGAL: list[Any] = [-1.0, float("nan"), float("inf"), "0.1", None, torch.ones(2)]

EDITS: list[Callable[[dict[str, Any], random.Random], None]] = [
    *[lambda g, chance: g.update(lr=chance.random())] * 6,
    lambda g, chance: g.update(lr=copy.deepcopy(chance.choice(LRS))),
    lambda g, chance: g.update(lr=chance.choice(ILLEGAL)),
    lambda g, chance: g.update(betas=chance.choice([(0.9, 0.99), [0.5, 0.6], (0.9, 1.0), (0.9,), 0.9])),
    lambda g, chance: g.update(eps=chance.choice([1e-8, 1e-6, -1.0])),
    lambda g, chance: g.update(weight_decay=chance.choice([0, 0.1, torch.tensor(0.1)])),
    lambda g, chance: g.update(maximize=chance.choice([True, False, 1])),
    lambda g, chance: g.update(seed=chance.choice([0, 7])),
    lambda g, chance: g.update(moment_rounding=chance.choice(["dithered", "nearest"])),
    *[lambda g, chance: change_in_place(g["lr"], chance)] * 2,
    *[lambda g, chance: change_in_place(g["betas"], chance)] * 2,
    lambda g, chance: change_in_place(g["weight_decay"], chance),
]


def change_in_place(value: Any, chance: random.Random) -> None:
    """Gives a tensor, or the first item of a list, another value. The object in the group stays the same."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value.fill_(chance.random() / 10)
    elif isinstance(value, list):
        value[0] = chance.random()


def stepped(opt: Any) -> Any:
    """Steps; returns the weights, or the message of the error."""
    weights = [p for group in opt.param_groups for p in group["params"]]
    for p in weights:
        p.grad = torch.ones_like(p)
    try:
        opt.step()
    except (RuntimeError, TypeError, ValueError) as refusal:
        return type(refusal), str(refusal)
    return [p.tolist() for p in weights]


@pytest.mark.parametrize("seed", range(12))
def test_an_optimizer_steps_as_a_copy_without_a_table_does(seed: int) -> None:
    chance = random.Random(seed)
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(chance.choice([1, 1, 3]))]
    opt = torch_ext.AdamW([{"params": [p]} for p in params], lr=0.1)
    legal = [{key: value for key, value in group.items() if key != "params"} for group in opt.param_groups]
    answers = list[Any]()
    for _ in range(60):
        if chance.random() < 0.4:
            for group, before in zip(opt.param_groups, legal, strict=True):
                group.update(before)
        for _ in range(chance.choice([0, 1, 1, 2])):
            chance.choice(EDITS)(chance.choice(opt.param_groups), chance)
        other = copy.deepcopy(opt)
        answers.append(stepped(opt))
        assert answers[-1] == stepped(other)
    refused = sum(isinstance(answer, tuple) for answer in answers)
    assert 0 < refused < len(answers) - 10
