"""The strategies of our own buckets by name."""

from torch_ext.parallel.strategies.no_shard import NoShard
from torch_ext.parallel.strategies.optim import ShardedOptimizer
from torch_ext.parallel.strategies.optim_grads import ShardedGradients
from torch_ext.parallel.strategies.strategy import ShardingStrategy

STRATEGIES: dict[str, type[ShardingStrategy]] = {
    "no_shard": NoShard,
    "optim": ShardedOptimizer,
    "optim_grads": ShardedGradients,
}
