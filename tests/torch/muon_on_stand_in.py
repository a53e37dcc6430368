"""What tests of Muon run first in a process with a stand-in for a GPU (gpu_stand_in.py)."""

import pathlib

import gpu_stand_in

_HELPERS = pathlib.Path(gpu_stand_in.__file__).parent
PREAMBLE = f"""
import json, os, random, sys
sys.path[:0] = {[str(_HELPERS), str(gpu_stand_in.ROOT)]!r}
import torch
from gpu_stand_in import StandIn, without_pinned_memory
stand_in = StandIn(*sys.argv[1:])
import torch_ext
torch.set_num_threads(1)

vector_norm = torch.linalg.vector_norm

def exact_norm(*arguments, dtype=None, **options):  # as the CPU's, so that bits can be compared
    return vector_norm(*arguments, dtype=torch.float64 if dtype is torch.float32 else dtype, **options)

torch.linalg.vector_norm = exact_norm

SHAPES = [(48, 16), (16, 32), (3, 8, 12), (24, 24), (7,)]

def made(device, shapes=SHAPES, **options):
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s, generator=generator).bfloat16().to(device)) for s in shapes]
    named = [(f"p{{i}}", p) for i, p in enumerate(params)]
    return torch_ext.Muon(named, **({{"lr": 0.05, "split": {{"p3": 2}}}} | options))

def trained(optimizer, steps=3, clip=False):
    params = optimizer.param_groups[0]["params"]
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype).to(p.device)
        if clip:
            torch_ext.clip_grad_norm_(optimizer, 0.5)
        optimizer.step()
    return [p.detach().cpu() for p in params]
"""
