"""Which buckets travel together: agreed over the ranks from how fast backward and the wire were (tx_coalesce of C).

Reports of some cycles carry what a rank measured in those before, means over them, and from the same reports every rank
computes the same. Bits depend on none of it.
"""

import ctypes
import time
from collections.abc import Sequence

import torch

from torch_ext import _library
from torch_ext._layout import BucketPlan
from torch_ext._wire import Wire

_Int64s = ctypes.POINTER(ctypes.c_int64)

_FIRST, _LAST = 3, 48
"""Cycles from one decision to the next: first so many, of which one may have shown the order, then twice as many each
time, up to so many."""


class _Args(_library.Struct):
    c_name = "tx_coalesce_args"
    _fields_ = [
        ("size", ctypes.c_uint64),
        ("n_buckets", ctypes.c_int64),
        ("bytes", _Int64s),
        ("buffer", _Int64s),
        ("n_ranks", ctypes.c_int64),
        ("ready", _Int64s),
        ("ended", _Int64s),
        ("tail", _Int64s),
        ("tail_bytes", ctypes.c_int64),
    ]


class Coalescing:
    """Of one plan's buckets, on one rank. Every bucket is a message until `learn` says otherwise."""

    def __init__(self, plan: BucketPlan, enabled: bool) -> None:
        """enabled: whether they may be joined at all; the same on every rank."""
        self._plan = plan
        self._n = len(plan.buckets)
        self._enabled = enabled and self._n > 1
        self.ends = frozenset(range(1, self._n + 1))
        """The bucket after each message's last one."""
        self._interval, self._left = _FIRST, _FIRST
        # Of the cycles that the last report has not told yet, in nanoseconds; from the last bucket to the last sum:
        self._sums = torch.zeros(self._n + 1, dtype=torch.int64)
        self._least_tail = 0
        self._cycles = 0
        self._begin = 0
        self._times: list[int] = []
        self.sent = 0
        """Buckets that `complete` gave away in this cycle."""

    def reset(self) -> None:
        """A new cycle."""
        self._times.clear()
        self.sent = 0

    def complete(self, bucket: int) -> range | None:
        """Bucket after bucket: those that leave now that this one is complete, if they do."""
        now = time.monotonic_ns()
        if not self._times:
            self._begin = now
        self._times.append(now - self._begin)
        if bucket + 1 not in self.ends:
            return None
        leaving, self.sent = range(self.sent, bucket + 1), bucket + 1
        return leaving

    def ended(self) -> None:
        """All sums of this cycle have come."""
        if self._enabled and len(self._times) == self._n:
            end = time.monotonic_ns() - self._begin
            tail = end - self._times[-1]
            self._least_tail = min(self._least_tail, tail) if self._cycles else tail
            self._sums += torch.tensor([*self._times, end])
            self._cycles += 1

    def words(self) -> torch.Tensor:
        """For the report of a cycle, while it is not known yet when its sums come: int64, as many on every rank."""
        if not self._enabled or self._left > 1:
            return self._sums[:0]
        return torch.cat([self._sums // max(1, self._cycles), torch.tensor([self._least_tail])]) // 1000

    def learn(self, reports: Sequence[torch.Tensor]) -> bool:
        """The words of every rank, when a cycle was closed; whether other buckets than before are joined."""
        if not self._enabled:
            return False
        self._left -= 1
        if self._left:
            return False
        self._left = self._interval = min(2 * self._interval, _LAST)
        self._sums.zero_()
        self._cycles = self._least_tail = 0
        before, self.ends = self.ends, self._joined(torch.stack(list(reports)))
        return self.ends != before

    def _joined(self, rows: torch.Tensor) -> frozenset[int]:
        ready, ended, tail = rows[:, :-2].contiguous(), rows[:, -2].contiguous(), rows[:, -1].contiguous()
        numbers, n = ctypes.c_int64 * self._n, ctypes.c_int64()
        ends = numbers()
        buckets = self._plan.buckets
        sizes = [Wire.size_of(b.numel, b.grad_comm_dtype) for b in buckets]
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
        )
        coalesce = _library.function("tx_coalesce", ctypes.POINTER(_Args), _Int64s, _Int64s)
        coalesce(ctypes.byref(args), ends, ctypes.byref(n))
        return frozenset(ends[: n.value])
