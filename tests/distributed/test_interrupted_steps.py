"""A step that Ctrl-C interrupts on one rank: weights that are on their way are waited for before they are used, and
where some were stepped and others not, every later call says so."""

import contextlib
from typing import Any

import pytest
import ranks
import torch
from gradients import BF16, FP32, Given, noise, policy
from test_interrupts import interrupted

import torch_ext
from torch_ext.optim import device_step

SHAPES: list[Any] = [(300,), (5, 77), (300,), (1000,)]
SHARDED = ["optim", "optim_grads"]


def _model(strategy: str, dtypes: Any = None) -> Any:
    torch.manual_seed(0)
    model: Any = Given(SHAPES, BF16)
    for i, dtype in (dtypes or {}).items():
        getattr(model, f"p{i}").data = getattr(model, f"p{i}").data.to(dtype)
    return torch_ext.parallelize(model, policy(BF16, bucket_size=300), strategy=strategy)


def _weights(model: Any) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def _is_interrupted(rank: int, world: int, strategy: str) -> tuple[list[Any], list[str]]:
    """The weights that each forward sees; rank 0 is interrupted while it waits for those of the first step."""
    model = _model(strategy)
    optimizer, seen = torch_ext.AdamW(model.parameters(), lr=0.1), []
    model.register_forward_pre_hook(lambda *_: seen.append(_weights(model)))
    for step in range(3):
        model([g.to(BF16) for g in noise(step, rank, SHAPES)]).backward()
        with interrupted(rank, "weights of") if step == 0 else contextlib.nullcontext():
            optimizer.step()
        optimizer.zero_grad()
    model([g.to(BF16) for g in noise(3, rank, SHAPES)])
    return [[w.view(torch.int16).tolist() for w in weights] for weights in seen], [str(world)]


@pytest.mark.parametrize("strategy", SHARDED)
def test_weights_that_were_not_waited_for_are_there_in_the_next_forward(strategy: str) -> None:
    first, *others = ranks.run(3, _is_interrupted, strategy)
    assert all(other == first for other in others)
    assert len({str(weights) for weights in first[0]}) == 4, "each step changes them"


def _half(rank: int, _world: int, strategy: str) -> list[str]:
    """Rank 0 is interrupted after the first operator of a step, of which sharded strategies have several."""
    model = _model(strategy, {1: FP32})
    optimizer, said = torch_ext.AdamW(model.parameters(), lr=0.1), []
    grads = [g.to(p.dtype) for g, p in zip(noise(0, rank, SHAPES), model.parameters(), strict=True)]
    model(grads).backward()
    run = device_step.DeviceStep.run

    def once(self: Any, *args: Any) -> None:
        run(self, *args)
        if rank == 0:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_step.DeviceStep, "run", once)
        try:
            optimizer.step()
        except (KeyboardInterrupt, RuntimeError) as error:
            said.append(type(error).__name__)
    optimizer.zero_grad()
    for _ in range(2):
        try:
            model(grads).backward()
            said.append("goes on")
        except RuntimeError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("strategy", ["no_shard", *SHARDED])
def test_a_rank_that_stepped_some_parameters_only_says_so_for_good(strategy: str) -> None:
    first, *others = ranks.run(2, _half, strategy, timeout=3.0)
    assert first[0] == "KeyboardInterrupt"
    assert all("step() was interrupted" in text and "Load a checkpoint" in text for text in first[1:]), first
    assert all("goes on" not in said for said in others), others


def _refused(rank: int, _world: int, strategy: str) -> bool:
    """A step that was refused before it wrote anything is no failure."""
    model = _model(strategy)
    optimizer = torch_ext.AdamW(model.parameters(), lr=0.1, on_external_write="error")
    for step in range(3):
        model([g.to(BF16) for g in noise(step, rank, SHAPES)]).backward()
        if step == 1:
            with torch.no_grad():
                model.p0.add_(1)
            with pytest.raises(RuntimeError):
                optimizer.step()
            optimizer.resync_masters()
        optimizer.step()
        optimizer.zero_grad()
    return True


@pytest.mark.parametrize("strategy", ["no_shard", *SHARDED])
def test_a_refused_step_is_no_failure(strategy: str) -> None:
    assert ranks.run(2, _refused, strategy) == [True, True]
