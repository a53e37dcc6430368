"""Whether this processor multiplies matrices faster in fp32 or in bf16."""

import functools
import time

import torch

from torch_ext.optim.muon.hyper import NS_DTYPES

_SIZE = 512  # of the square matrices
_REPEATS = 4


@functools.cache
def faster_dtype(device: torch.device) -> str:
    """Of NS_DTYPES, measured once; fp32, which is more exact, where there is little between them."""
    seconds = dict.fromkeys(NS_DTYPES, float("inf"))
    for _ in range(_REPEATS):  # interleaved: what else the machine does falls on both
        for name, dtype in NS_DTYPES.items():
            seconds[name] = min(seconds[name], _seconds(dtype, device))
    return "bfloat16" if seconds["bfloat16"] < 0.9 * seconds["float32"] else "float32"


def _seconds(dtype: torch.dtype, device: torch.device) -> float:
    a, out = torch.ones(_SIZE, _SIZE, dtype=dtype, device=device), torch.empty(_SIZE, _SIZE, dtype=dtype, device=device)
    begin = time.process_time()  # of all threads, whatever else the machine does
    torch.mm(a, a, out=out)
    return time.process_time() - begin
