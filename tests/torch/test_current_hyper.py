"""The table of hyper-parameters that is kept from step to step equals a new one, whatever was edited in the groups."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torch_ext
from torch_ext.optim.current_hyper import CurrentHyper
from torch_ext.params import param_groups

CPU = torch.device("cpu")

LRS: list[Any] = [0.0, 0.5, 1, True, torch.tensor(0.25), torch.tensor(1e-3, dtype=torch.float64)]
ILLEGAL: list[Any] = [-1.0, float("nan"), float("inf"), "0.1", None, torch.ones(2)]

EDITS: list[Callable[[dict[str, Any], random.Random], None]] = [
    *[lambda g, chance: g.update(lr=chance.random())] * 6,
    lambda g, chance: g.update(lr=chance.choice(LRS)),
    lambda g, chance: g.update(lr=chance.choice(ILLEGAL)),
    lambda g, chance: g.update(betas=chance.choice([(0.9, 0.99), [0.5, 0.6], (0.9, 1.0), (0.9,), 0.9])),
    lambda g, chance: g.update(eps=chance.choice([1e-8, 1e-6, -1.0])),
    lambda g, chance: g.update(weight_decay=chance.choice([0, 0.1, torch.tensor(0.1)])),
    lambda g, chance: g.update(maximize=chance.choice([True, False, 1])),
    lambda g, chance: g.update(seed=chance.choice([0, 7])),
    lambda g, chance: g.update(moment_rounding=chance.choice(["dithered", "nearest"])),
]


def answer(table: Callable[[], param_groups.HyperparameterTable]) -> Any:
    try:
        made = table()
    except (TypeError, ValueError) as refusal:
        return type(refusal), str(refusal)
    return numbers(made)


def numbers(table: param_groups.HyperparameterTable) -> list[Any]:
    return [table.groups.tolist(), list(map(float, table.lrs)), table.shared]


@pytest.mark.parametrize("seed", range(20))
def test_a_kept_table_equals_a_new_one(seed: int) -> None:
    chance = random.Random(seed)
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(chance.choice([1, 1, 3]))]
    groups = torch_ext.AdamW([{"params": [p]} for p in params], lr=0.1).param_groups
    legal = [dict(group) for group in groups]
    current, kept = CurrentHyper(), list[tuple[param_groups.HyperparameterTable, list[Any]]]()
    answers = list[Any]()
    for _ in range(80):
        if chance.random() < 0.4:
            for group, before in zip(groups, legal, strict=True):
                group.update(before)
        for _ in range(chance.choice([0, 1, 1, 2])):
            chance.choice(EDITS)(chance.choice(groups), chance)
        keeps = chance.random() < 0.2
        answers.append(answer(lambda: current.table(groups, CPU, False)))
        expected = answer(lambda: param_groups.hyper(groups, CPU))
        assert answers[-1] == expected
        if keeps and not isinstance(answers[-1][0], type):
            table = current.table(groups, CPU, True)
            kept.append((table, numbers(table)[0]))
        assert all(table.groups.tolist() == before for table, before in kept)
    assert any(isinstance(a[0], type) for a in answers) and kept


def test_only_new_lrs_make_no_new_table() -> None:
    """A schedule of floats. A table that somebody keeps is left alone."""
    groups = torch_ext.AdamW([torch.nn.Parameter(torch.ones(3))], lr=0.1).param_groups
    current = CurrentHyper()
    first = current.table(groups, CPU, keeps=False)
    groups[0]["lr"] = 0.2
    second = current.table(groups, CPU, keeps=True)
    assert second.groups is first.groups and second.groups[0, 0] == 0.2
    groups[0]["lr"] = 0.3
    third = current.table(groups, CPU, keeps=False)
    assert third.groups[0, 0] == 0.3 and second.groups[0, 0] == 0.2
