"""Measures whether this processor multiplies matrices faster in fp32 or in bf16."""

import functools
import time

import torch

from torch_ext.optim.muon.hyper import NS_DTYPES

_SIZE = 512  # of the square matrices
_REPEATS = 4


@functools.cache
def faster_dtype(device: torch.device) -> str:
    """Returns the name (of NS_DTYPES) of the faster dtype, measured once; fp32, which is more exact, if bf16 takes at
    least 0.9 of fp32's time."""
    seconds = dict.fromkeys(NS_DTYPES, float("inf"))
    for _ in range(_REPEATS):  # interleaved, so that other load on the machine affects both dtypes
        for name, dtype in NS_DTYPES.items():
            seconds[name] = min(seconds[name], _seconds(dtype, device))
    return "bfloat16" if seconds["bfloat16"] < 0.9 * seconds["float32"] else "float32"


def _seconds(dtype: torch.dtype, device: torch.device) -> float:
    a, out = torch.ones(_SIZE, _SIZE, dtype=dtype, device=device), torch.empty(_SIZE, _SIZE, dtype=dtype, device=device)
    begin = time.process_time()  # CPU time of all threads of this process, which other processes do not affect
    torch.mm(a, a, out=out)
    return time.process_time() - begin
