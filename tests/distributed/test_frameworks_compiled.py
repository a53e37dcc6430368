"""torch.compile and parallelize, in either order and under each strategy, must give the bits of the eager model."""

from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
from gradients import BF16, FP32, bits, policy
from torch import nn
from torch.distributed.tensor import DTensor

import torch_ext

WORLD, STEPS = 2, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 33), nn.Linear(33, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.relu(self.up(x)))


def _network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), Block(), Block(), nn.Linear(16, 1)).to(BF16)


def _compile(module: nn.Module, fullgraph: bool) -> Any:
    return torch.compile(module, backend="aot_eager", fullgraph=fullgraph)


def _in_blocks(model: Any, fullgraph: bool) -> Any:
    for i in (1, 2):
        model[i].compile(backend="aot_eager", fullgraph=fullgraph)
    return model


Parallel = Callable[[Any], Any]

# What is compiled, and before or after parallelize. Called with the model, a function that parallelizes it, and
# whether graphs must have no breaks.
ORDERS: dict[str, Callable[[Any, Parallel, bool], Any]] = {
    "eager": lambda model, parallel, full: parallel(model),
    "whole, then parallelize": lambda model, parallel, full: parallel(_compile(model, full)),
    "parallelize, then whole": lambda model, parallel, full: _compile(parallel(model), full),
    "blocks, then parallelize": lambda model, parallel, full: parallel(_in_blocks(model, full)),
    "parallelize, then blocks": lambda model, parallel, full: _in_blocks(parallel(model), full),
}


def _trained(rank: int, way: str, order: str) -> tuple[list[float], list[bytes], list[str]]:
    """Trains with accumulation and clipping. Returns norms, the bits of the whole weights, parameter names."""
    torch._dynamo.reset()
    chosen = policy(BF16, FP32, FP32, bucket_size=600)
    full = way != "optim_grads_params"  # FSDP2's own hooks break graphs
    model = ORDERS[order](_network(), lambda one: torch_ext.parallelize(one, chosen, strategy=way), full)
    optimizer = torch_ext.AdamW(model.named_parameters(), lr=1e-2, policy=chosen)
    norms = []
    for step in range(2 * STEPS):
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(WORLD * step + rank))
        (model(x.to(BF16))[:, 0].float() - x.abs().sum(1)).square().mean().backward()
        if step % 2:
            norms.append(float(torch_ext.clip_grad_norm_(optimizer, 0.05)))
            optimizer.step()
            optimizer.zero_grad()
    names = [name.replace("_orig_mod.", "") for name in model.state_dict()]
    return norms, bits([p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]), names


def _all(rank: int, world: int, way: str, orders: list[str]) -> dict[str, Any]:
    return {order: _trained(rank, way, order) for order in orders}


WHOLE, BLOCKS = ([order for order in ORDERS if part in order] for part in ("whole", "blocks"))
CASES = {"no_shard": WHOLE, "optim": BLOCKS, "optim_grads": WHOLE, "optim_grads_params": [WHOLE[1], *BLOCKS]}


@pytest.mark.parametrize("way", CASES)
def test_compiled_and_parallelized_in_each_order_has_the_bits_of_eager(way: str) -> None:
    zero, one = ranks.run(WORLD, _all, way, ["eager", *CASES[way]], limit=100)
    for order in CASES[way]:
        assert zero[order] == one[order] == zero["eager"], order
