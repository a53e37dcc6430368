"""What is sharded, as a table: no_shard, optim, optim_grads."""
