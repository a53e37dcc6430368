"""Which elements of which parameter lie in a part of a bucket."""

import ctypes
import functools
from collections.abc import Callable

from torch_ext import _library
from torch_ext._exchange import Part
from torch_ext._layout import BucketPlan
from torch_ext._wire import Piece


@functools.cache
def _intersect() -> Callable[..., int]:
    int64 = ctypes.c_int64
    return _library.function(
        "tx_layout_intersect", int64, int64, int64, int64, ctypes.POINTER(ctypes.c_int64), restype=ctypes.c_int64
    )


def pieces(plan: BucketPlan, buckets: range, begin: int, end: int) -> list[Piece]:
    """The buckets' parameters' runs in elements [begin, end) of the buffer, by their place; empty ones left out."""
    found = []
    first = ctypes.c_int64()
    for i in (i for bucket in buckets for i in plan.in_bucket(bucket)):
        p = plan.parameters[i]
        numel = _intersect()(p.start, p.numel, begin, end, ctypes.byref(first))
        if numel:
            found.append(Piece(i, first.value, numel, p.start + first.value - begin))
    return found


def part_of(plan: BucketPlan, buckets: range, part: Part) -> tuple[int, int]:
    """The elements [begin, end) of their buffer that a part of neighbouring buckets has (tx_layout_shard: parts are
    equal)."""
    start = plan.buckets[buckets[0]].start
    numel = sum(plan.buckets[b].numel for b in buckets) // part.of
    return start + numel * part.number, start + numel * (part.number + 1)


def by_rank(plan: BucketPlan, buckets: range, world_size: int) -> list[Piece]:
    """The parameters' runs in a message of neighbouring buckets in which each rank's parts of them lie side by side:
    one run for each part that a parameter reaches into."""
    found, begin = [], 0
    for rank in range(world_size):
        for b in buckets:
            first, end = part_of(plan, range(b, b + 1), Part(rank, world_size))
            found += [p._replace(at=begin + p.at) for p in pieces(plan, range(b, b + 1), first, end)]
            begin += end - first
    return found
