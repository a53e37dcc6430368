"""`HostBuffer`, the host memory for offloaded storages: allocated once and used again by each offload."""

from collections.abc import Iterable, Iterator

from torch import Tensor

from torch_ext.tensors import host_copies

SLAB = 1 << 28
"""The most bytes of a slab. torch pins memory in powers of two, so a single buffer could take twice the bytes
needed."""
_MIN_SLAB = 1 << 12


class HostBuffer:
    """Host memory with offsets [0, capacity), in slabs. It grows as needed and never shrinks."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._slabs: list[Tensor] = []
        self.capacity = 0

    def reserve(self, nbytes: int) -> None:
        """Increases the capacity to at least nbytes."""
        while self.capacity < nbytes:
            wanted = max(_MIN_SLAB, min(SLAB, nbytes - self.capacity))
            slab = host_copies.allocate(1 << (wanted - 1).bit_length(), self._pinned)
            self._slabs.append(slab)
            self.capacity += slab.numel()

    def store(self, sources: Iterable[tuple[int, Tensor]]) -> None:
        """Copies data into this buffer. sources: (offset in this buffer, tensor), tensors uint8 of one dimension on any
        device. Copies from a device are only queued."""
        host_copies.copy((host, part) for offset, source in sources for host, part in self._slices(offset, source))

    def load(self, targets: Iterable[tuple[int, Tensor]]) -> None:
        """Copies data out of this buffer. targets: (offset, tensor), as for `store`. Copies to a device are only
        queued.
        """
        pairs = ((part, host) for offset, target in targets for host, part in self._slices(offset, target))
        host_copies.copy(pairs, fresh=True)

    def _slices(self, offset: int, t: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the bytes [offset, offset + t.numel()) of this buffer slab by slab, each with its part of t."""
        start = 0
        for slab in self._slabs:
            first, last = max(offset, start), min(offset + t.numel(), start + slab.numel())
            if first < last:
                yield slab[first - start : last - start], t[first - offset : last - offset]
            start += slab.numel()
