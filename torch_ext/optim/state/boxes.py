"""A run of a tensor's memory as boxes of its elements: checkpoints know tensors by boxes, ranks have runs."""

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple, TypeAlias

Index: TypeAlias = tuple[int, ...]


class Box(NamedTuple):
    """The elements at offsets[d] <= index[d] < offsets[d] + sizes[d]."""

    offsets: Index
    sizes: Index


class Run(NamedTuple):
    """Elements [start, stop), in memory order, of a dense tensor."""

    shape: Index
    order: Index
    """The dimensions, those of the greatest stride first."""
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def whole(self) -> bool:
        return self.numel == prod(self.shape)

    def strides(self) -> Index:
        found, stride = [0] * len(self.shape), 1
        for dim in reversed(self.order):
            found[dim], stride = stride, stride * max(self.shape[dim], 1)
        return tuple(found)

    def boxes(self, limit: int) -> list[Box]:
        """Boxes of at most `limit` elements, each once in memory order and whole; without a limit at most 2k - 1 of k
        dimensions. A tensor without elements is one box: that it is there is all there is to know."""
        in_order = [self.shape[dim] for dim in self.order]
        if prod(self.shape) == 0:
            return [Box((0,) * len(self.shape), self.shape)]
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        return [
            Box(tuple(offsets[i] for i in back), tuple(sizes[i] for i in back))
            for offsets, sizes in _cover(in_order, self.start, self.stop, limit)
        ]


def order_of(shape: Sequence[int], strides: Sequence[int]) -> Index:
    """The dimensions of a dense tensor in memory order; where one has no extent, any place is right for it."""
    return tuple(sorted(range(len(shape)), key=lambda dim: (-strides[dim], dim) if shape[dim] > 1 else (0, dim)))


def _cover(shape: Sequence[int], start: int, stop: int, limit: int) -> Iterator[tuple[Index, Index]]:
    """Offsets and sizes of boxes that cover the elements [start, stop) of a contiguous tensor."""
    if not shape:
        yield from [((), ())] * (stop - start)
        return
    rest = tuple(shape[1:])
    row, at = prod(rest), start
    while at < stop:
        first, begin = divmod(at, row)
        if begin == 0 and stop - at >= row and (row <= limit or not rest):
            rows = min((stop - at) // row, max(limit // row, 1))
            yield (first, *(0 for _ in rest)), (rows, *rest)
            at += rows * row
            continue
        end = min(stop - first * row, row)
        for offsets, sizes in _cover(rest, begin, end, limit):
            yield (first, *offsets), (1, *sizes)
        at = first * row + end
