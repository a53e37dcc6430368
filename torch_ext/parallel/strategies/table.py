"""The strategies of our own buckets by name."""

from torch_ext.parallel.strategies.no_shard import Replicated
from torch_ext.parallel.strategies.optim import OptimizerShards
from torch_ext.parallel.strategies.optim_grads import GradientShards
from torch_ext.parallel.strategies.strategy import Store

STORES: dict[str, type[Store]] = {"no_shard": Replicated, "optim": OptimizerShards, "optim_grads": GradientShards}
