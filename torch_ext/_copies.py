"""Copies between host memories: one on this thread, or many at a time on as many threads as torch has."""

import ctypes
import functools
import itertools
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torch_ext import _library

CHUNK = 1 << 22
"""Bytes that a thread copies at a time. Threads take the next chunk when they are done with one, of whichever pair: a
parallel region for each pair would wait for its slowest thread every time."""


# Memory that was just allocated has no pages yet. To be given many at once costs less than a fault for each,
# which is most of what a copy into such memory costs.
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE: Linux >= 5.14; others refuse it, and pages come one by one
_PAGE = 1 << 12
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def _populate(address: int, nbytes: int) -> None:
    begin = address // _PAGE * _PAGE
    _madvise(begin, address + nbytes - begin, _POPULATE_WRITE)


@functools.cache
def on_this_thread() -> Callable[[int, int, int], None]:
    """The library's copy: takes the address of the target, that of the source and the bytes. It runs without the
    interpreter's lock and does not wait for torch's pool."""
    pointer, nbytes = ctypes.c_void_p, ctypes.c_int64
    return _library.function("tx_copy", pointer, pointer, nbytes, restype=None)


def copy(pairs: Sequence[tuple[Tensor, Tensor]], *, fresh: bool) -> None:
    """Targets and sources: contiguous, of equal bytes, on the CPU; no target overlaps anything else. fresh: targets
    were just allocated."""
    step = CHUNK // 4 if fresh else CHUNK  # its pages are in the cache still when they are written
    chunks = [
        (target.data_ptr() + begin, source.data_ptr() + begin, min(step, target.nbytes - begin))
        for target, source in pairs
        for begin in range(0, target.nbytes, step)
    ]
    turn = itertools.count()
    copy_one = on_this_thread()

    def work() -> None:
        while (i := next(turn)) < len(chunks):
            target, source, nbytes = chunks[i]
            if fresh:
                _populate(target, nbytes)
            copy_one(target, source, nbytes)

    numel = sum(nbytes for *_, nbytes in chunks)
    others = min(torch.get_num_threads(), -(-numel // step)) - 1
    threads = [threading.Thread(target=work, daemon=True) for _ in range(others)]
    for thread in threads:
        thread.start()
    try:
        work()
    finally:
        for thread in threads:
            thread.join()
