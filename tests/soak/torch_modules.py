"""The modules of torch that every process of the soak needs."""

TORCH_MODULES = [
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
]
