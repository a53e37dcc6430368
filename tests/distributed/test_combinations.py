"""E1: every combination of dtypes runs under every strategy, or raises an error that says what is supported."""

from itertools import product
from typing import Any

import pytest
import ranks
import torch
from gradients import BF16, FP16, FP32, noise, whole_gradients
from torch.distributed.tensor import DTensor

import torch_ext

ROWS = 24
PARAMS = {"fp32": FP32, "bf16": BF16, "fp16": FP16}
MAIN_PARAMS = [None, "fp32", "fp16"]
MAIN_GRADS = [None, "fp32", "bf16", "fp16"]
WIRES = ["fp32", "bf16", "fp16", "fp8"]
STRATEGIES = ["no_shard", "optim", "optim_grads", "optim_grads_params"]
# Relative error of one rounding to the dtype.
ROUNDING = {FP32: 2**-24, BF16: 2**-8, FP16: 2**-11, torch.uint8: 2**-4}


class Product(torch.nn.Module):
    """A weight whose gradient is exactly what the module is called with."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(ROWS, 16, dtype=dtype))

    def forward(self, grad: torch.Tensor) -> torch.Tensor:
        return (self.weight * grad).sum()


def _run(rank: int, world: int, param: str, main_params: Any, main: Any, wire: str, strategy: str) -> str:
    """Runs one backward and step and checks the gradient. Returns "ran", or the error's text."""
    dtype = PARAMS[param]
    try:
        policy = torch_ext.load_policy(
            dtype,
            override_optimizer_config={"main_params_dtype": main_params, "main_grads_dtype": main},
            override_ddp_config={"grad_comm_dtype": wire},
        )
        model = torch_ext.parallelize(torch.nn.Sequential(Product(dtype)), policy, strategy=strategy)
        optimizer = torch_ext.AdamW(model.parameters(), lr=0.5, policy=policy)
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    model(noise(1, rank, [(ROWS, 16)], dtype)[0]).backward()
    (weight,) = model.parameters()
    (grad,) = whole_gradients(model)
    main_grads = policy.main_grads_dtype or dtype
    assert torch.equal(grad.to(main_grads).float(), grad), "it fits into the dtype that it should be in"
    mean = torch.stack([noise(1, r, [(ROWS, 16)], dtype)[0].double() for r in range(world)]).mean(0)
    error = (grad.double() - mean).abs().max()
    limit = sum(ROUNDING[d] for d in (policy.grad_comm_dtype, main_grads, policy.grad_comm_dtype))
    assert error <= 4 * limit * mean.abs().max(), f"{float(error)} of {float(mean.abs().max())}"
    optimizer.step()
    moved = weight.full_tensor() if isinstance(weight, DTensor) else weight.detach()
    assert (moved.float()[grad > 0.1] < 1).all(), "a step against the gradient"
    optimizer.zero_grad()
    return "ran"


def _combinations(rank: int, world: int, strategy: str) -> dict[Any, str]:
    """Runs every combination under a strategy."""
    cases = product(PARAMS, MAIN_PARAMS, MAIN_GRADS, WIRES)
    return {case: _run(rank, world, *case, strategy) for case in cases}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_e1_every_combination_runs_or_is_refused_by_name(strategy: str) -> None:
    first, second = ranks.run(2, _combinations, strategy, limit=120.0)
    assert first == second, "ranks agree"
    refused = {case: words for case, words in first.items() if words != "ran"}
    for (_, main_params, _, _), words in refused.items():
        assert main_params == "fp16", f"{words}: only a master that holds no more than a weight is refused"
        assert "main_params_dtype" in words and "float32" in words
    assert len(refused) == len(first) // 3
