"""Sharded strategies: what lies where (E2, E3), the exact numbers (E4, E5), the step, and equal results (bits)."""

from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from gradients import BF16, FP16, FP32, Given, bits, noise, policy

import torch_ext

SHARDED = ["optim", "optim_grads"]
STRATEGIES = ["no_shard", *SHARDED]

# -- E4, E5: the exact numbers ------------------------------------------------------------------------------------

A = ([1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0])
B = ([1.0] * 4, [3.0] * 4)
MEAN_A, SUM_A = [3.0, 4.0, 5.0, 6.0], [6.0, 8.0, 10.0, 12.0]
MEAN_AB, SUM_AB = [5.0, 6.0, 7.0, 8.0], [10.0, 12.0, 14.0, 16.0]
DTYPES = [
    pytest.param((FP32, None, None), id="fp32"),
    pytest.param((BF16, None, None), id="bf16"),
    pytest.param((BF16, FP32, FP32), id="bf16-main-fp32"),
    pytest.param((BF16, FP32, BF16), id="bf16-main-fp32-wire-bf16"),
    pytest.param((FP32, FP32, BF16), id="fp32-wire-bf16"),
    pytest.param((FP16, None, None), id="fp16"),
]


class Quarters(torch.nn.Module):
    """Four numbers, the first and last pair in shards of different ranks (of two)."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.p0 = torch.nn.Parameter(torch.zeros(256, dtype=dtype))

    def forward(self, numbers: list[float]) -> torch.Tensor:
        grad = torch.zeros(256, dtype=self.p0.dtype)
        grad[:2], grad[128:130] = torch.tensor(numbers[:2]), torch.tensor(numbers[2:])
        return (self.p0 * grad).sum()


def _shard_of(model: Any) -> list[float]:
    """The two numbers that this rank's optimizer reads."""
    grad = torch_ext._parallel._engine_of(model).grad(model.p0)
    assert grad is not None and grad.numel() == 128 and not grad[2:].any()
    return grad[:2].tolist()


def _microbatches(rank: int, world: int, strategy: str, dtypes: Any, factor: float | None, how: str) -> Any:
    model = Quarters(dtypes[0])
    torch_ext.parallelize(model, policy(*dtypes), strategy=strategy, gradient_divide_factor=factor)
    a, b = list(A[rank]), list(B[rank])
    if how == "one":
        model(a).backward()
    elif how == "no_sync":
        with model.no_sync():
            model(a).backward()
        model(b).backward()
    else:
        model(a).backward()
        if how == "zeroed":
            model.zero_grad()
        model(b).backward()
    return _shard_of(model), torch_ext._parallel._engine_of(model).grad(model.p0).dtype


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("strategy", SHARDED)
@pytest.mark.parametrize(
    ("how", "mean", "total"),
    [
        pytest.param("one", MEAN_A, SUM_A, id="E4-one microbatch"),
        pytest.param("no_sync", MEAN_AB, SUM_AB, id="E5-no_sync"),
        pytest.param("two", MEAN_AB, SUM_AB, id="E5-two backwards"),
        pytest.param("zeroed", [2.0] * 4, [4.0] * 4, id="E5-zeroed between"),
    ],
)
def test_e4_e5_the_exact_numbers(strategy: str, dtypes: Any, how: str, mean: list[float], total: list[float]) -> None:
    for factor, expected in ((None, mean), (1.0, total)):
        answers = ranks.run(2, _microbatches, strategy, dtypes, factor, how)
        for rank, (shard, dtype) in enumerate(answers):
            assert shard == expected[2 * rank : 2 * rank + 2]
            assert dtype == (dtypes[1] or (FP32 if dtypes[0] == FP16 else dtypes[0]))
