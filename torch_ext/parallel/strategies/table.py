"""The classes of the strategies that use our own buckets, and all strategies' names."""

import ctypes

from torch_ext.native import dtypes, library
from torch_ext.parallel.strategies.no_shard import NoShard
from torch_ext.parallel.strategies.optim import ShardedOptimizer
from torch_ext.parallel.strategies.optim_grads import ShardedGradients
from torch_ext.parallel.strategies.strategy import ShardingStrategy
from torch_ext.policy import policy_struct

STRATEGIES: dict[str, type[ShardingStrategy]] = {
    "no_shard": NoShard,
    "optim": ShardedOptimizer,
    "optim_grads": ShardedGradients,
}


def strategies() -> tuple[str, ...]:
    """Returns the names of all strategies, FSDP2's included; a strategy's number is its position."""
    choices = next(row.choices for row in policy_struct.rows() if row.name == "data_parallel_sharding_strategy")
    return tuple(filter(None, choices))


def strategy_of(given: str | int) -> str:
    """Returns the name of a strategy given by name or number. Raises ValueError, with the legal ones, for any other."""
    names = strategies()
    if isinstance(given, int) and not isinstance(given, bool) and 0 <= given < len(names):
        given = names[given]
    if isinstance(given, str):
        found = ctypes.c_int32()
        find = library.function("tx_strategy_find", ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p)
        find(b"strategy ", dtypes.c_text(given), ctypes.byref(found))
        return names[found.value]
    legal = ", ".join(f"{name!r} ({i})" for i, name in enumerate(names))
    raise ValueError(f"strategy is {given!r}; legal are {legal}")
