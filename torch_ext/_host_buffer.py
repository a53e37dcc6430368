"""Host memory for what leaves a device for a while: allocated once, in slabs, and filled again every time.

This is the one place that knows what kind of memory a device copies from and to fast. On a machine without an
accelerator host memory stands in for the device's: the same code runs, and nothing has to be pinned.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from torch_ext import _copies

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
            _copies.copy(pairs, fresh=fresh)
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
