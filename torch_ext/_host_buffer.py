"""Host memory for what leaves a device for a while: allocated once, in slabs, and filled again every time.

This is the one place that knows what kind of memory a device copies from and to fast. On a machine without an
accelerator host memory stands in for the device's: the same code runs, and nothing has to be pinned.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

SLAB = 1 << 28
"""Bytes of a slab at most. Pinned memory comes in powers of two, so one buffer of all bytes could take twice as many."""
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

    def store(self, at: int, source: Tensor) -> None:
        """Bytes (uint8, one dimension, any device) -> bytes from `at` on. Does not wait for an accelerator."""
        for host, begin in self._runs(at, source.numel()):
            host.copy_(source[begin : begin + host.numel()], non_blocking=self._pinned)

    def load(self, at: int, target: Tensor) -> None:
        """Bytes from `at` on -> `target`, likewise."""
        for host, begin in self._runs(at, target.numel()):
            target[begin : begin + host.numel()].copy_(host, non_blocking=self._pinned)

    def _runs(self, at: int, nbytes: int) -> Iterator[tuple[Tensor, int]]:
        """Bytes [at, at + nbytes) slab by slab, and where each run begins among them."""
        start = 0
        for slab in self._slabs:
            first, last = max(at, start), min(at + nbytes, start + slab.numel())
            if first < last:
                yield slab[first - start : last - start], first - at
            start += slab.numel()
