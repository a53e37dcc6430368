"""Whole training loops: parallelize, our optimizer, clipping and accumulation, in every dtype of the policy."""

from typing import Any

import pytest
import ranks
import torch
from gradients import BF16, FP16, FP32, bits, policy

import torch_ext


def _make(dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(3)
    layers = [
        torch.nn.Linear(12, 96),
        torch.nn.GELU(),
        torch.nn.Linear(96, 96),
        torch.nn.GELU(),
        torch.nn.Linear(96, 1),
    ]
    return torch.nn.Sequential(*layers).to(dtype)


def _batch(step: int, part: int, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns part `part` of the step's batch. The batch is the same for any number of parts."""
    x = torch.randn(24, 12, generator=torch.Generator().manual_seed(step)).chunk(parts)[part]
    return x, x.sin().sum(1, keepdim=True)


def _train(rank: int, world: int, dtypes: Any, microbatches: int) -> tuple[list[float], list[bytes], list[float]]:
    """Trains 60 steps; returns losses, the bits of the weights, and norms."""
    model = _make(dtypes[0])
    # A scale with which no step overflows: after a skipped step, two runs would no longer be comparable.
    model_policy = policy(*dtypes, loss_scale=256.0, bucket_size=2000, overlap_grad_reduce=True)
    torch_ext.parallelize(model, model_policy)
    optimizer = torch_ext.AdamW(model.parameters(), lr=3e-3, policy=model_policy)
    scaler = model_policy.grad_scaler()
    losses, norms = [], []
    parts = world * microbatches
    for step in range(60):
        total = 0.0
        for i in range(microbatches):
            x, y = _batch(step, rank * microbatches + i, parts)
            with model.sync() if i == microbatches - 1 else model.no_sync():
                loss = (model(x.to(dtypes[0])).float() - y).square().mean()
                scaler.scale(loss / microbatches).backward()
            total += float(loss.detach()) / microbatches
        scaler.unscale_(optimizer)
        norms.append(float(torch_ext.clip_grad_norm_(optimizer, 1.0)))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(total)
    return losses, bits(list(model.parameters())), norms


@pytest.mark.parametrize(
    ("dtypes", "tolerance"),
    [
        # Tolerances of the loss against one rank. fp32: sums in another order, a few ulps that 60 steps magnify.
        pytest.param((FP32, FP32, FP32), 1e-4, id="fp32"),
        pytest.param((BF16, BF16, BF16), 0.1, id="bf16"),
        pytest.param((BF16, FP32, BF16), 0.1, id="bf16-main-fp32-wire-bf16"),
        pytest.param((FP16, FP32, FP32), 0.1, id="fp16"),
    ],
)
def test_ranks_and_microbatches_train_like_one_rank(dtypes: Any, tolerance: float) -> None:
    (alone,) = ranks.run(1, _train, dtypes, 1)
    for microbatches in (1, 3):
        first, second = ranks.run(2, _train, dtypes, microbatches)
        assert first[1] == second[1], "weights are equal to the bit"
        assert first[2] == second[2], "so are the norms"
        together = [(a + b) / 2 for a, b in zip(first[0], second[0], strict=True)]
        assert sum(together[-10:]) < 0.3 * sum(together[:10])
        for ours, reference in zip(together, alone[0], strict=True):
            assert abs(ours - reference) <= tolerance * max(reference, 0.1 * alone[0][0])
