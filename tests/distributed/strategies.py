"""The strategies whose buckets are ours, and running one function under each of them in one set of processes."""

from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch

import torch_ext
from torch_ext.parallel.strategies import no_shard, optim, optim_grads, table

STRATEGIES = list(table.STRATEGIES)
SHARDED = [name for name, store in table.STRATEGIES.items() if store.sharded]


def _each(rank: int, world: int, body: Callable[..., Any], chosen: list[str], args: Any) -> dict[str, Any]:
    return {strategy: body(rank, world, strategy, *args) for strategy in chosen}


def run(
    world_size: int, body: Callable[..., Any], *args: Any, chosen: list[str] = STRATEGIES, **limits: float
) -> dict[str, list[Any]]:
    """What body(rank, world_size, strategy, *args) returned under each strategy on each rank; every rank returns."""
    answers = ranks.run(world_size, _each, body, chosen, args, **limits)
    return {strategy: [answer[strategy] for answer in answers] for strategy in chosen}


def gradient(model: Any, param: torch.Tensor) -> torch.Tensor | None:
    """What this rank's optimizer reads of the parameter's gradient: flat under sharded strategies."""
    grad = torch_ext.parallel.parallelize._engine_of(model).grad(param)
    return None if grad is None else grad.detach().clone().reshape(-1)


def part(model: Any, param: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor that is laid out like the parameter."""
    local = torch_ext.parallel.parallelize._engine_of(model).local(param)
    return whole.reshape(-1)[local.start : local.start + local.weight.numel()]


def replace_reduce_chunks(replacement: Callable[..., Any], patch: pytest.MonkeyPatch | None = None) -> None:
    """How received chunks are summed, under every strategy. patch: what undoes it; None: it stays for the process."""
    patch = pytest.MonkeyPatch() if patch is None else patch
    for module in (no_shard, optim, optim_grads):
        patch.setattr(module, "reduce_chunks", replacement)
