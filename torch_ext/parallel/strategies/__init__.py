"""The strategies that use our own buckets: no_shard, optim, optim_grads."""
