"""Gradients whose placements differ from their parameters', as sequence-parallel layers leave them: a step must be that
of the whole gradient."""

from typing import Any

import pytest
import ranks
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import torch_ext

CASES: dict[str, tuple[Any, Any]] = {  # placements of the parameter and of its gradient
    "a sum that was not made": (Replicate(), Partial()),
    "a sum of a shard": (Shard(0), Partial()),
    "whole, of a shard": (Shard(0), Replicate()),
    "columns, of rows": (Shard(0), Shard(1)),
    "rows, of a whole one": (Replicate(), Shard(0)),
}


def _clip(optimizer: Any, step: int) -> None:
    torch_ext.clip_grad_norm_(optimizer, 0.5)


def _clip_in_place(optimizer: Any, step: int) -> None:
    torch_ext.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.5)


def _unscale(optimizer: Any, step: int) -> None:
    """Unscales, with another scale in each step: Adam's step does not depend on a scale that stays the same."""
    config = {"initial_loss_scale": 16.0**step}
    scaler = torch_ext.load_policy(torch.float16, override_optimizer_config=config).grad_scaler()
    scaler.scale(torch.ones(1))
    scaler.unscale_(optimizer)


HOW: dict[str, Any] = {
    "alone": lambda optimizer, step: None,
    "clipped": _clip,
    "clipped in place": _clip_in_place,
    "unscaled": _unscale,
}


def _steps(rank: int, world: int, case: str, how: str) -> None:
    """Steps a DTensor and a plain parameter; both must get the same weights."""
    of_param, of_grad = CASES[case]
    mesh = init_device_mesh("cpu", (world,))
    draw = torch.Generator().manual_seed(1)
    weight = torch.randn(6, 4, generator=draw)
    sharded, plain = nn.Parameter(distribute_tensor(weight, mesh, [of_param])), nn.Parameter(weight.clone())
    ours, alone = torch_ext.AdamW([sharded], lr=0.1), torch_ext.AdamW([plain], lr=0.1)
    for step in range(3):
        grad = torch.randn(6, 4, generator=draw) * (step + 1)
        if of_grad.is_partial():
            share = grad * (rank + 1) / sum(range(1, world + 1))
            sharded.grad = DTensor.from_local(share, mesh, [of_grad], run_check=False)
        else:
            sharded.grad = distribute_tensor(grad, mesh, [of_grad])
        plain.grad = grad
        for optimizer in (ours, alone):
            HOW[how](optimizer, step)
            optimizer.step()
        torch.testing.assert_close(sharded.full_tensor(), plain)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("case", CASES)
def test_the_step_is_that_of_the_whole_gradient(case: str, how: str) -> None:
    ranks.run(2, _steps, case, how)


def _partial_parameter(rank: int, world: int) -> str:
    mesh = init_device_mesh("cpu", (world,))
    p = nn.Parameter(DTensor.from_local(torch.ones(3), mesh, [Partial()], run_check=False))
    with pytest.raises(TypeError) as raised:
        optimizer = torch_ext.AdamW([p])
        p.grad = DTensor.from_local(torch.ones(3), mesh, [Partial()], run_check=False)
        optimizer.step()
    return str(raised.value)


def test_a_parameter_that_is_a_sum_is_refused() -> None:
    for message in ranks.run(2, _partial_parameter):
        assert "is a pending sum (Partial): redistribute it" in message
