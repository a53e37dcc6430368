"""optim_grads_params: torch's FSDP2 with our reduce-scatter and shards."""
