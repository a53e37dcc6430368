"""The strategies whose buckets are ours, and running one function under each of them in one set of processes."""

from collections.abc import Callable
from typing import Any

import ranks

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
