"""Host memory that a device copies from and to fast, and these copies: the one place that makes either.

Without an accelerator host memory stands in for the device's: the same code runs, and nothing has to be pinned.
"""

import ctypes
import functools
import itertools
import threading
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from torch_ext.native import library

CHUNK = 1 << 22
"""Bytes that a thread copies at a time. Threads take the next chunk when they are done with one, of whichever pair: a
parallel region for each pair would wait for its slowest thread every time."""

_BRIEF = 1 << 15  # bytes that are copied sooner than another thread gives the interpreter's lock back
_PAGE = 1 << 12
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE: Linux >= 5.14; others refuse it, and pages are faulted in one by one
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def allocate(nbytes: int, pinned: bool) -> Tensor:
    """Host memory, uint8 [nbytes], uninitialised. pinned: for copies from and to an accelerator."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned, device="cpu")


def copy(pairs: Iterable[tuple[Tensor, Tensor]], *, fresh: bool = False) -> None:
    """Copies the second tensor of each pair to the first one. Shapes and dtypes of a pair are equal.

    Between a device and pinned host memory the copy is queued on the device's current stream. Between host memories it
    is done when this returns, by as many threads as torch has: tensors are contiguous then, no target overlaps anything
    else, and fresh says that targets were just allocated.
    """
    on_host = []
    for target, source in pairs:
        if target.is_cpu and source.is_cpu:
            on_host.append((target, source))
        else:
            target.copy_(source, non_blocking=True)
    _copy_on_host(on_host, fresh)


def copy_and_wait(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """`copy` between devices and pinned host memory, done when this returns: the copies of a device are queued one
    behind the other, and the host waits for the last one of each."""
    by_device: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
    for target, source in pairs:
        by_device.setdefault(source.device if target.is_cpu else target.device, []).append((target, source))
    for queued in by_device.values():
        copy(queued[:-1])
        target, source = queued[-1]
        target.copy_(source)


def synchronize(devices: Iterable[torch.device]) -> None:
    """Waits until everything that these devices were told to do is done."""
    for device in devices:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)


def _copy_on_host(pairs: list[tuple[Tensor, Tensor]], fresh: bool) -> None:
    step = CHUNK // 4 if fresh else CHUNK  # its pages are in the cache still when they are written
    chunks = [
        (target.data_ptr() + begin, source.data_ptr() + begin, min(step, target.nbytes - begin))
        for target, source in pairs
        for begin in range(0, target.nbytes, step)
    ]
    turn = itertools.count()
    copies = _copy_bytes("tx_copy" if fresh else "tx_copy_nontemporal"), _copy_bytes("tx_copy", brief=True)

    def work() -> None:
        while (i := next(turn)) < len(chunks):
            target, source, nbytes = chunks[i]
            if fresh:
                _populate(target, nbytes)
            copies[nbytes <= _BRIEF](target, source, nbytes)

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


def _populate(address: int, nbytes: int) -> None:
    """Makes the pages of memory that was just allocated: many at once cost less than a fault for each, which is most of
    what a copy into such memory costs."""
    begin = address // _PAGE * _PAGE
    _madvise(begin, address + nbytes - begin, _POPULATE_WRITE)


@functools.cache
def _copy_bytes(name: str, brief: bool = False) -> Callable[[int, int, int], None]:
    """A copy of the library's on the calling thread: takes the addresses of the target and of the source, and the
    bytes. It does not wait for torch's pool. brief: with the interpreter's lock, as `library.function` says."""
    pointer, nbytes = ctypes.c_void_p, ctypes.c_int64
    return library.function(name, pointer, pointer, nbytes, restype=None, brief=brief)
