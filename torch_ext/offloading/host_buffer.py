"""Host memory for what is offloaded: allocated once, and filled again every time."""

from collections.abc import Iterable, Iterator

from torch import Tensor

from torch_ext.tensors import host_copies

SLAB = 1 << 28
"""Bytes of a slab at most. torch pins memory in powers of two, so one buffer of all bytes could take twice as many."""
_MIN_SLAB = 1 << 12


class HostBuffer:
    """Bytes [0, capacity) of host memory, in slabs; grows, and is kept as long as this lives."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._slabs: list[Tensor] = []
        self.capacity = 0

    def reserve(self, nbytes: int) -> None:
        """Makes the capacity nbytes at least."""
        while self.capacity < nbytes:
            wanted = max(_MIN_SLAB, min(SLAB, nbytes - self.capacity))
            slab = host_copies.allocate(1 << (wanted - 1).bit_length(), self._pinned)
            self._slabs.append(slab)
            self.capacity += slab.numel()

    def store(self, sources: Iterable[tuple[int, Tensor]]) -> None:
        """sources: offsets in this buffer, and what to copy there (uint8, one dimension, any device). A device's copies
        are queued."""
        host_copies.copy((host, part) for offset, source in sources for host, part in self._slices(offset, source))

    def load(self, targets: Iterable[tuple[int, Tensor]]) -> None:
        """Copies back what was stored at these offsets, likewise."""
        pairs = ((part, host) for offset, target in targets for host, part in self._slices(offset, target))
        host_copies.copy(pairs, fresh=True)

    def _slices(self, offset: int, t: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Bytes [offset, offset + t.numel()) slab by slab, and the part of t beside each."""
        start = 0
        for slab in self._slabs:
            first, last = max(offset, start), min(offset + t.numel(), start + slab.numel())
            if first < last:
                yield slab[first - start : last - start], t[first - offset : last - offset]
            start += slab.numel()
