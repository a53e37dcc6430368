"""Which buckets are sent together, and whether compressed: agreed over the ranks from how fast backward and the wire
were (tx_coalesce, tx_compress_pays of C).

Reports of some cycles carry what a rank measured in those before, means over them, and from the same reports every rank
computes the same. Bits depend on none of it.
"""

import ctypes
import time
from collections.abc import Sequence

import torch

from torch_ext.comm import compression
from torch_ext.comm.wire import WireBuffer
from torch_ext.native import library, structs
from torch_ext.parallel.bucket_plan import BucketPlan

_Int64s = ctypes.POINTER(ctypes.c_int64)

_FIRST, _LAST = 3, 48
"""Cycles from one decision to the next: first so many, of which one may have shown the order, then twice as many each
time, up to so many."""


@structs.mirror("tx_coalesce_args")
class _Args(library.Struct):
    kept: tuple[torch.Tensor, ...]  # what it points to


@structs.mirror("tx_compression")
class _Compression(library.Struct):
    """The decision, from one to the next."""


class BucketJoining:
    """Of one plan's buckets, on one rank. Every bucket is a message, and as it is, until `learn` says otherwise."""

    def __init__(
        self,
        plan: BucketPlan,
        joins: bool,
        compresses_below: float = 0.0,
        compresses: bool = False,
        sharded: bool = False,
    ) -> None:
        """The same on every rank. joins: whether they may be joined at all. compresses: whether they are compressed.
        compresses_below: Gbit/s, of the policy; 0: that stays as it is. sharded: whether each rank has a part of each.
        """
        self._plan = plan
        self._n = len(plan.buckets)
        self._joins = joins and self._n > 1
        self._below, self._sharded = compresses_below, sharded
        self.enabled = self._joins or self._below > 0
        self.ends = frozenset(range(1, self._n + 1))
        """The bucket after each message's last one."""
        self.compresses = compresses
        self._compression = _Compression()
        self._interval, self._left = _FIRST, _FIRST
        # Of the cycles since the last report, in nanoseconds. Tail: from the last bucket to the last sum.
        self._sums = torch.zeros(self._n + 1, dtype=torch.int64)
        self._least_tail = 0
        self._cycles = 0
        self._begin = 0
        self._times: list[int] = []

    def reset(self) -> None:
        """A new cycle."""
        self._times.clear()

    def complete(self) -> None:
        """Called bucket after bucket, as each is complete."""
        now = time.monotonic_ns()
        if not self._times:
            self._begin = now
        self._times.append(now - self._begin)

    def ended(self) -> None:
        """All sums of this cycle are there."""
        if self.enabled and len(self._times) == self._n:
            end = time.monotonic_ns() - self._begin
            tail = end - self._times[-1]
            self._least_tail = min(self._least_tail, tail) if self._cycles else tail
            self._sums += torch.tensor([*self._times, end])
            self._cycles += 1

    def words(self, disordered: bool) -> torch.Tensor:
        """For the report of a cycle, before its sums are there: int64, as many on every rank.

        disordered: whether compression was of no use for too many messages.
        """
        if not self.enabled or self._left > 1:
            return self._sums[:0]
        times = torch.cat([self._sums // max(1, self._cycles), torch.tensor([self._least_tail])]) // 1000
        return torch.cat([times, torch.tensor([int(disordered)])])

    def learn(self, reports: Sequence[torch.Tensor]) -> bool:
        """The words of every rank, when a cycle was closed; whether anything is decided differently than before."""
        if not self.enabled:
            return False
        self._left -= 1
        if self._left:
            return False
        self._left = self._interval = min(2 * self._interval, _LAST)
        self._sums.zero_()
        self._cycles = self._least_tail = 0
        rows = torch.stack(list(reports))
        before = self.ends, self.compresses
        measured = self._measured(rows[:, :-1])
        if self._below > 0:
            self._compression.on = self.compresses
            self.compresses = not rows[:, -1].any() and self._pays(measured)
        if self._joins:
            measured.compressed = self.compresses
            self.ends = self._joined(measured)
        return (self.ends, self.compresses) != before

    def _measured(self, rows: torch.Tensor) -> _Args:
        ready, ended, tail = rows[:, :-2].contiguous(), rows[:, -2].contiguous(), rows[:, -1].contiguous()
        numbers = ctypes.c_int64 * self._n
        buckets = self._plan.buckets
        sizes = [self._size_of(b.numel, b.grad_comm_dtype) for b in buckets]
        last = max(self.ends - {self._n}, default=0)
        args = _Args(
            size=ctypes.sizeof(_Args),
            n_buckets=self._n,
            bytes=numbers(*sizes),
            buffer=numbers(*(b.buffer for b in buckets)),
            n_ranks=len(rows),
            ready=ctypes.cast(ready.data_ptr(), _Int64s),
            ended=ctypes.cast(ended.data_ptr(), _Int64s),
            tail=ctypes.cast(tail.data_ptr(), _Int64s),
            tail_bytes=sum(sizes[last:]),
            sharded=self._sharded,
        )
        args.kept = ready, ended, tail
        return args

    def _size_of(self, numel: int, dtype: torch.dtype) -> int:
        """As it was sent."""
        return (self.compresses and compression.size(numel, dtype)) or WireBuffer.size_of(numel, dtype)

    def _pays(self, args: _Args) -> bool:
        arguments = ctypes.POINTER(_Args), ctypes.c_double, ctypes.POINTER(_Compression)
        found = self._compression
        library.function("tx_compress_pays", *arguments)(ctypes.byref(args), self._below, ctypes.byref(found))
        return bool(found.on)

    def _joined(self, args: _Args) -> frozenset[int]:
        ends, n = (ctypes.c_int64 * self._n)(), ctypes.c_int64()
        coalesce = library.function("tx_coalesce", ctypes.POINTER(_Args), _Int64s, _Int64s)
        coalesce(ctypes.byref(args), ends, ctypes.byref(n))
        return frozenset(ends[: n.value])
