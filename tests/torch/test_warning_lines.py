"""Warnings are at the caller's line: not in this package, nor in what torch puts around every step."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

import torch_ext


def made(**options: object) -> torch_ext.AdamW:
    p = nn.Parameter(torch.ones(300, dtype=torch.bfloat16))
    return torch_ext.AdamW([p], **options)


def without_gradients() -> None:
    made().step()


def by_a_scheduler() -> None:
    """Which puts its own step around the optimizer's."""
    optimizer = made()
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()


def within_no_grad() -> None:
    with torch.no_grad():
        made().step()


def decorated() -> None:
    torch.no_grad()(torch.enable_grad()(without_gradients))()


def skipped() -> None:
    optimizer = made(skip_nonfinite=True)
    optimizer.param_groups[0]["params"][0].grad = torch.full((300,), float("inf"), dtype=torch.bfloat16)
    torch_ext.clip_grad_norm_(optimizer, 1.0)
    optimizer.step()


def loaded() -> None:
    averaged = made(ema_decay=0.9)
    averaged.param_groups[0]["params"][0].grad = torch.ones(300, dtype=torch.bfloat16)
    averaged.step()
    made().load_state_dict(averaged.state_dict())


def told_by_a_policy() -> None:
    torch_ext.load_policy(nn.Linear(2, 2).bfloat16(), override_ddp_config={"compress_below_gbps": 0})


@pytest.mark.parametrize(
    "act", [without_gradients, by_a_scheduler, within_no_grad, decorated, skipped, loaded, told_by_a_policy]
)
def test_it_is_the_callers(act: Callable[[], None]) -> None:
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        act()
    ours = [one for one in given if str(one.message).startswith("torch_ext: ")]
    assert ours
    assert {one.filename for one in ours} == {__file__}
