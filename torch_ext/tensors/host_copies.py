"""Allocates pinned host memory, and copies between host and device. No other module does either.

Without an accelerator, host memory stands in for the device's: the same code runs, and nothing has to be pinned.
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
"""Bytes that a thread copies at a time. A thread that finishes a chunk takes the next one, of any pair. One parallel
region per pair would wait for its slowest thread each time."""

_BRIEF = 1 << 15  # bytes; copying so few is faster than releasing the GIL and getting it back from another thread
_PAGE = 1 << 12
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE: Linux >= 5.14; others refuse it, and pages are faulted in one by one
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def allocate(nbytes: int, pinned: bool) -> Tensor:
    """Returns uninitialised host memory, uint8 [nbytes]. pinned: for copies from and to an accelerator."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned, device="cpu")


def copy(pairs: Iterable[tuple[Tensor, Tensor]], *, fresh: bool = False) -> None:
    """Copies the second tensor of each pair to the first one. Shapes and dtypes of a pair are equal.

    Between a device and pinned host memory, the copy is queued on the device's current stream. Between host memories,
    the copy is complete on return, and uses as many threads as torch does. Host tensors must be contiguous, and targets
    must overlap nothing else. fresh: targets in host memory were just allocated.
    """
    on_host = []
    for target, source in pairs:
        if target.is_cpu and source.is_cpu:
            on_host.append((target, source))
        else:
            target.copy_(source, non_blocking=True)
    _copy_on_host(on_host, fresh)


def copy_and_wait(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copies like `copy` between devices and pinned host memory, and waits for completion. The copies of a device are
    queued one after the other, and the host waits only for the device's last one."""
    by_device: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
    for target, source in pairs:
        by_device.setdefault(source.device if target.is_cpu else target.device, []).append((target, source))
    for queued in by_device.values():
        copy(queued[:-1])
        target, source = queued[-1]
        target.copy_(source)


def synchronize(devices: Iterable[torch.device]) -> None:
    """Waits for all queued work of these devices."""
    for device in devices:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)


def _copy_on_host(pairs: list[tuple[Tensor, Tensor]], fresh: bool) -> None:
    """Copies between host tensors in chunks, on as many threads as torch uses."""
    step = CHUNK // 4 if fresh else CHUNK  # small enough that pages zeroed by the kernel are still in the cache
    chunks = [
        (target.data_ptr() + begin, source.data_ptr() + begin, min(step, target.nbytes - begin))
        for target, source in pairs
        for begin in range(0, target.nbytes, step)
    ]
    turn = itertools.count()
    copies = _copy_bytes("tx_copy" if fresh else "tx_copy_nontemporal"), _copy_bytes("tx_copy", keep_gil=True)

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
    """Maps all pages of newly allocated memory at once. Otherwise each page costs a page fault when it is first
    written, which is most of the cost of a copy into new memory."""
    begin = address // _PAGE * _PAGE
    _madvise(begin, address + nbytes - begin, _POPULATE_WRITE)


@functools.cache
def _copy_bytes(name: str, keep_gil: bool = False) -> Callable[[int, int, int], None]:
    """Returns the library's copy function, called with the target's address, the source's address and the number of
    bytes. It runs on the calling thread and does not wait for torch's thread pool. keep_gil: see `library.function`."""
    pointer, nbytes = ctypes.c_void_p, ctypes.c_int64
    return library.function(name, pointer, pointer, nbytes, restype=None, keep_gil=keep_gil)
