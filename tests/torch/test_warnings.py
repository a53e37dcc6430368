"""A warning points to the line of the user's code that caused it, not to a line of torch or of this library."""

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import torch_ext


@contextmanager
def warned_here(says: str) -> Iterator[None]:
    """Asserts that the code in this context causes exactly one warning of ours, which points to this file."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield
    ours = [w for w in found if str(w.message).startswith("torch_ext: ")]
    assert len(ours) == 1 and says in str(ours[0].message)
    assert ours[0].filename == __file__


def optimizer_of(dtype: torch.dtype = torch.bfloat16, **options: Any) -> torch_ext.AdamW:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(dtype)
    return torch_ext.AdamW(model.parameters(), **options)


def fill(optimizer: torch.optim.Optimizer, value: float = 1.0) -> None:
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.full_like(p, value)


def plainly(step: Callable[[], Any]) -> None:
    step()


def compiled(step: Callable[[], Any]) -> None:
    torch.compile(step, backend="eager")()


@pytest.mark.parametrize("how", [plainly, compiled])
def test_of_a_step(how: Any) -> None:
    optimizer = optimizer_of()
    with warned_here("found no gradient"):
        how(lambda: optimizer.step())


def test_of_a_step_in_a_schedule() -> None:
    """LRScheduler wraps step(), which adds a stack frame."""
    optimizer = optimizer_of()
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with warned_here("found no gradient"):
        optimizer.step()


def test_of_a_clip() -> None:
    optimizer = optimizer_of()
    fill(optimizer, float("nan"))
    torch_ext.clip_grad_norm_(optimizer, 1.0)
    with warned_here("a step was skipped"):
        optimizer.step()


def test_of_a_load() -> None:
    optimizer = optimizer_of(states="fp32")
    fill(optimizer, 1 / 3)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    other = optimizer_of(states="8bit")
    with warned_here("of the loaded state"):
        other.load_state_dict(saved)


def test_of_names_that_got_lost() -> None:
    named = [("weight", nn.Parameter(torch.ones(4).bfloat16()))]
    saved = torch_ext.AdamW(named).state_dict()
    del saved["param_groups"][0]["param_names"]
    other = torch_ext.AdamW([named[0][1]])
    with warned_here("rounded with thresholds that depend on parameter names"):
        other.load_state_dict(saved)


def test_of_a_policy() -> None:
    with warned_here("is now grad_comm_compression"):
        torch_ext.load_policy(torch.bfloat16, override_ddp_config={"compress_below_gbps": 0.0})
