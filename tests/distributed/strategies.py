"""The strategies whose buckets are ours, and running one function under each of them in one set of processes."""

from collections.abc import Callable
from typing import Any

import pytest
import ranks

from torch_ext.parallel import bucket_mean
from torch_ext.parallel.strategies import optim, optim_grads

SHARDED = ["optim", "optim_grads"]
STRATEGIES = ["no_shard", *SHARDED]


def _each(rank: int, world: int, body: Callable[..., Any], chosen: list[str], args: Any) -> dict[str, Any]:
    return {strategy: body(rank, world, strategy, *args) for strategy in chosen}


def run(
    world_size: int, body: Callable[..., Any], *args: Any, chosen: list[str] = STRATEGIES, **limits: float
) -> dict[str, list[Any]]:
    """What body(rank, world_size, strategy, *args) returned under each strategy on each rank; every rank returns."""
    answers = ranks.run(world_size, _each, body, chosen, args, **limits)
    return {strategy: [answer[strategy] for answer in answers] for strategy in chosen}


def replace_reduce_chunks(replacement: Callable[..., Any], patch: pytest.MonkeyPatch | None = None) -> None:
    """How received chunks are summed, under every strategy. patch: what undoes it; None: it stays for the process."""
    patch = pytest.MonkeyPatch() if patch is None else patch
    for module in (bucket_mean, optim, optim_grads):
        patch.setattr(module, "reduce_chunks", replacement)
