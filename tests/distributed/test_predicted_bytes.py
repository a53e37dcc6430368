"""The simulator (tests/core/cycle_cost.h) must predict the bytes that ranks send."""

from typing import Any

import pytest
import ranks
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torch_ext
from bench.cost.simulator import Case, Cluster, Link, Model, predict

BF16, FP32 = torch.bfloat16, torch.float32

ANY = Cluster(1, Link(1e-6, 1e10), Link(1e-5, 1e9))
"""A cluster for the simulator; its speeds do not change the bytes."""

CAP_MB = 0.1
"""The size of DistributedDataParallel's buckets."""


class Net(nn.Module):
    """A model with sizes that no number of ranks divides, and parameters outside of its blocks."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding = nn.Embedding(101, 130, dtype=dtype)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(130, width, dtype=dtype), nn.Tanh(), nn.Linear(width, 130, dtype=dtype))
            for width in (257, 300, 131)
        )
        self.norm = nn.LayerNorm(130, dtype=dtype)
        self.head = nn.Linear(130, 101, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x)).float()


POLICIES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "bf16": (BF16, {}),
    "bf16, small buckets": (BF16, {"bucket_size": 20_000}),
    "8-bit wire": (BF16, {"bucket_size": 50_000, "grad_comm_dtype": "fp8"}),
    "fp32, bf16 wire": (FP32, {"bucket_size": 50_000, "grad_comm_dtype": "bf16"}),
    "no check": (BF16, {"bucket_size": 50_000, "check_for_nan_in_grad": False}),
}


def _policy(name: str) -> Any:
    dtype, ddp = POLICIES[name]
    # Compression is off, so the bytes do not depend on how fast the link was measured.
    return torch_ext.load_policy(dtype, override_ddp_config={"grad_comm_compression": "off", **ddp})


def _sent(rank: int, world: int, strategy: str, names: list[str]) -> dict[str, int]:
    """Returns by policy the bytes of a second step; the first one may also send the order of gradients."""
    return {name: _sent_under(strategy, name) for name in names}


def _sent_under(strategy: str, name: str) -> int:
    """Returns the bytes of a second step."""
    torch.manual_seed(1)
    policy = _policy(name)
    model: Any = Net(policy.param_dtype)
    counts: Any = model
    if strategy == "DDP hook":
        model = DistributedDataParallel(model, bucket_cap_mb=CAP_MB)
        counts = torch_ext.register_comm_hook(model, policy)
    else:
        torch_ext.parallelize(model, policy, strategy=strategy)
    optimizer = torch_ext.AdamW(model.parameters(), policy=policy)
    sent = 0
    for _ in range(2):
        model(torch.arange(101)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        sent = counts.wire_bytes()
    return sent


STRATEGIES = {
    "no_shard": list(POLICIES),
    "optim": list(POLICIES),
    "optim_grads": list(POLICIES),
    "optim_grads_params": list(POLICIES),
    "DDP hook": ["bf16", "8-bit wire", "no check"],
}


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_predicted_is_sent(strategy: str, world: int) -> None:
    names = STRATEGIES[strategy]
    models = [Model.of(Net(POLICIES[name][0]), _policy(name), bucket_cap_mb=CAP_MB) for name in names]
    predicted = predict([Case(ANY, model, strategy, world) for model in models])
    for sent in ranks.run(world, _sent, strategy, names):
        assert sent == {name: cost.bytes for name, cost in zip(names, predicted, strict=True)}
    for cost in predicted:
        assert cost.in_flight_bytes <= cost.planned_bytes or strategy not in ("no_shard", "optim", "optim_grads")
