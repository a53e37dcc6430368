"""Converts a run of a tensor's memory, which is what a rank has, to boxes of its elements, which checkpoints use."""

import ctypes
import functools
from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple, TypeAlias

from torch_ext.native import library

Index: TypeAlias = tuple[int, ...]


class Box(NamedTuple):
    """The elements at offsets[d] <= index[d] < offsets[d] + sizes[d]."""

    offsets: Index
    sizes: Index


class Run(NamedTuple):
    """Elements [start, stop), in memory order, of a dense tensor."""

    shape: Index
    order: Index
    """The dimensions, those with the largest stride first."""
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
        """Returns disjoint boxes of at most `limit` elements that cover the run, in memory order (tx_layout_boxes). A
        tensor without elements is one empty box, so that a checkpoint knows that it exists."""
        ndim = len(self.shape)
        if prod(self.shape) == 0:
            return [Box((0,) * ndim, self.shape)]
        int64s, count = ctypes.c_int64 * ndim, ctypes.c_int64()
        run = int64s(*self.shape), int64s(*self.order), ndim, self.start, self.stop, limit
        _boxes()(*run, None, 0, ctypes.byref(count))
        found = (int64s * 2 * count.value)()
        _boxes()(*run, found, count, ctypes.byref(count))
        return [Box(tuple(offsets), tuple(sizes)) for offsets, sizes in found]


@functools.cache
def _boxes() -> Callable[..., None]:
    int64, pointer = ctypes.c_int64, ctypes.c_void_p
    return library.function("tx_layout_boxes", pointer, pointer, *[int64] * 4, pointer, int64, pointer)


def order_of(shape: Sequence[int], strides: Sequence[int]) -> Index:
    """Returns the dimensions of a dense tensor in memory order. Dimensions of size 0 or 1 fit anywhere: here, last."""
    return tuple(sorted(range(len(shape)), key=lambda dim: (-strides[dim], dim) if shape[dim] > 1 else (0, dim)))
