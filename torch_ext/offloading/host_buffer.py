"""Host memory for what leaves a device for a while: allocated once, in slabs, and filled again every time.

This is the one place that knows what kind of memory a device copies from and to fast. On a machine without an
accelerator host memory stands in for the device's: the same code runs, and nothing has to be pinned.
"""

import ctypes
import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from torch_ext.native import library

SLAB = 1 << 28
"""Bytes of a slab at most. Pinned memory comes in powers of two, so one buffer of all bytes could take twice as many.
"""
_LEAST = 1 << 12


def allocate(nbytes: int, pinned: bool) -> Tensor:
    """Host memory, uint8 [nbytes], of no particular content. pinned: for copies from and to an accelerator."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)


def wait(devices: Iterable[torch.device]) -> None:
    """Until copies from and to these devices are done."""
    for device in devices:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)


class HostBuffer:
    """Bytes [0, capacity) of host memory, which grows and is never given back while this lives."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._slabs: list[Tensor] = []
        self.capacity = 0

    def reserve(self, nbytes: int) -> None:
        """Sees to it that there are so many bytes at least."""
        while self.capacity < nbytes:
            wanted = max(_LEAST, min(SLAB, nbytes - self.capacity))
            slab = allocate(1 << (wanted - 1).bit_length(), self._pinned)
            self._slabs.append(slab)
            self.capacity += slab.numel()

    def store(self, sources: Iterable[tuple[int, Tensor]]) -> None:
        """Memories (uint8, one dimension, any device) -> bytes from the number on that stands before each. Does not
        wait for an accelerator."""
        self._copy(
            [(host, source[run]) for at, source in sources for host, run in self._runs(at, source.numel())], False
        )

    def load(self, targets: Iterable[tuple[int, Tensor]]) -> None:
        """The way back, likewise."""
        self._copy(
            [(target[run], host) for at, target in targets for host, run in self._runs(at, target.numel())], True
        )

    def _copy(self, pairs: Sequence[tuple[Tensor, Tensor]], fresh: bool) -> None:
        if not self._pinned:
            copy(pairs, fresh=fresh)
            return
        for target, source in pairs:
            target.copy_(source, non_blocking=True)

    def _runs(self, at: int, nbytes: int) -> Iterator[tuple[Tensor, slice]]:
        """Bytes [at, at + nbytes) slab by slab, and which of them each run is."""
        start = 0
        for slab in self._slabs:
            first, last = max(at, start), min(at + nbytes, start + slab.numel())
            if first < last:
                yield slab[first - start : last - start], slice(first - at, last - at)
            start += slab.numel()


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
    return library.function("tx_copy", pointer, pointer, nbytes, restype=None)


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
