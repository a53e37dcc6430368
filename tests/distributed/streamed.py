"""A small training with buckets of every size, for tests of the order of messages, sums and stream work."""

import contextlib
from typing import Any

import torch
from gradients import BF16, FP32, Given, bits, noise, policy
from torch.nn.parallel import DistributedDataParallel

import torch_ext

SHAPES: list[Any] = [(300,), (1,), (129, 3), (5, 5, 5), (2000,), (2,), (700,), (640,), (650,)]
DTYPES = {
    # Dtypes of parameters, main gradients and wire.
    "fp32": (FP32, FP32, FP32),
    "wire-bf16": (FP32, FP32, BF16),
    "bf16-main-fp32": (BF16, FP32, BF16),
    "wire-8-bit": (BF16, FP32, torch.uint8),
}


def trained(rank: int, strategy: str, dtypes: Any) -> list[bytes]:
    """Returns the whole weights after three steps of two micro-batches. strategy: one of torch_ext's, or "ddp hook"."""
    chosen = policy(*dtypes, bucket_size=300, overlap_grad_reduce=True)
    model: Any = Given(SHAPES, dtypes[0])
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.fill_(0.5 + i)
    if strategy == "ddp hook":
        model = DistributedDataParallel(model, bucket_cap_mb=0.002)
        torch_ext.register_comm_hook(model, chosen)
    else:
        torch_ext.parallelize(model, chosen, strategy=strategy)
    optimizer = torch_ext.AdamW(model.parameters(), lr=0.01, policy=chosen)
    for step in range(3):
        for microbatch in range(2):
            with model.no_sync() if microbatch == 0 else contextlib.nullcontext():
                model(noise(10 * step + microbatch, rank, SHAPES, dtypes[0])).backward()
        torch_ext.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return bits([p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()])
