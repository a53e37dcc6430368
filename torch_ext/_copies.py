"""Copies between host memories, many at a time, at the speed of one memcpy."""

import ctypes
import itertools
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

CHUNK = 1 << 22
"""Bytes that a thread copies at a time. Threads take the next chunk when they are done with one, of whichever pair: a
parallel region for each pair would wait for its slowest thread every time."""


def copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Targets and sources: contiguous, of equal bytes, on the CPU; no target overlaps anything else."""
    chunks = [
        (target.data_ptr() + begin, source.data_ptr() + begin, min(CHUNK, target.nbytes - begin))
        for target, source in pairs
        for begin in range(0, target.nbytes, CHUNK)
    ]
    turn = itertools.count()

    def work() -> None:
        while (i := next(turn)) < len(chunks):
            ctypes.memmove(*chunks[i])  # without the interpreter's lock

    numel = sum(nbytes for *_, nbytes in chunks)
    others = min(torch.get_num_threads(), -(-numel // CHUNK)) - 1
    threads = [threading.Thread(target=work, daemon=True) for _ in range(others)]
    for thread in threads:
        thread.start()
    try:
        work()
    finally:
        for thread in threads:
            thread.join()
