"""Swapping a moving average of the weights in, saving, and swapping it out must not change training by a bit."""

from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from gradients import BF16, bits
from torch import nn
from torch.distributed.tensor import DTensor

import torch_ext

WORLD = 2
WAYS = ["no_shard", "optim", "optim_grads", "optim_grads_params"]


def _local(p: Any) -> torch.Tensor:
    return p.to_local() if isinstance(p, DTensor) else p


def _by_state_dict(model: Any, values: dict[str, torch.Tensor]) -> None:
    model.load_state_dict(values)


def _by_data(model: Any, values: dict[str, torch.Tensor]) -> None:
    for name, p in model.named_parameters():
        _local(p.data).copy_(_local(values[name]))


def _in_place(model: Any, values: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(values[name])


def _into_the_state_dict(model: Any, values: dict[str, torch.Tensor]) -> None:
    for name, value in model.state_dict().items():
        value.copy_(values[name])


SWAPS = {
    "load_state_dict": _by_state_dict,
    ".data": _by_data,
    "copy_": _in_place,
    "state_dict": _into_the_state_dict,
}


def _run(way: str, settings: dict[str, Any], swap: Any) -> tuple[list[bytes], list[bytes]]:
    """Trains six steps and returns the bits of the weights and of the optimizer's whole state.

    swap: writes values into the model's weights; the average is swapped in and out with it after every second step."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 33), nn.ReLU(), nn.Linear(33, 1)).to(BF16)
    chosen = torch_ext.load_policy(
        BF16, override_optimizer_config=settings, override_ddp_config={"grad_comm_dtype": "fp32", "bucket_size": 100}
    )
    torch_ext.parallelize(model, chosen, strategy=way)
    optimizer = torch_ext.AdamW(model.named_parameters(), lr=1e-2, policy=chosen)
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    for step in range(6):
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(WORLD * step + dist.get_rank()))
        (model(x.to(BF16))[:, 0].float() - x.abs().sum(1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for name, p in model.named_parameters():
            average[name].lerp_(p.detach(), 0.5)
        if swap is not None and step % 2:
            kept = {name: p.detach().clone() for name, p in model.named_parameters()}
            swap(model, average)
            torch_ext.sync_parameters(model)
            model(x.to(BF16))
            saved = bits([_local(value) for value in model.state_dict().values()])
            assert saved == bits([_local(value) for value in average.values()]) and saved != bits(
                [_local(value) for value in kept.values()]
            )
            optimizer.consolidate_state_dict(to=None)
            swap(model, kept)
            torch_ext.sync_parameters(model)
    whole: Any = optimizer.consolidate_state_dict(to=None)
    states = [state[key] for state in whole["state"].values() for key in sorted(state)]
    return bits([p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]), bits(states)


def _all(rank: int, world: int, settings: dict[str, Any]) -> None:
    """Under each strategy, every way to swap must end with the bits of a run without swaps."""
    for way in WAYS:
        alone = _run(way, settings, None)
        for name, swap in SWAPS.items():
            assert _run(way, settings, swap) == alone, (way, name)


POLICIES = {"masters": {}, "remainders": {"store_param_remainders": True}}


@pytest.mark.parametrize("name", POLICIES)
def test_D4_masters_outlive_an_average_that_comes_and_goes(name: str) -> None:
    """A failure means that a master lost bits: it was set to its weight, although the weight had come back."""
    ranks.run(WORLD, _all, POLICIES[name], limit=100)
