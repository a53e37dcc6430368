"""The strategies whose buckets are ours, not FSDP2's, and a way to run one function under each of them."""

from collections.abc import Callable
from typing import Any

import ranks

SHARDED = ["optim", "optim_grads"]
STRATEGIES = ["no_shard", *SHARDED]


def _each(rank: int, world: int, body: Callable[..., Any], chosen: list[str], args: Any) -> dict[str, Any]:
    """Calls `body` under each strategy, in the same processes: starting new ones would cost more than the test."""
    return {strategy: body(rank, world, strategy, *args) for strategy in chosen}


def run(
    world_size: int, body: Callable[..., Any], *args: Any, chosen: list[str] = STRATEGIES, **limits: float
) -> dict[str, list[Any]]:
    """Returns, by strategy, what body(rank, world_size, strategy, *args) returned on each rank; all must return."""
    answers = ranks.run(world_size, _each, body, chosen, args, **limits)
    return {strategy: [answer[strategy] for answer in answers] for strategy in chosen}
