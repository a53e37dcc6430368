"""Which bucket is complete: tx_tracker of the C library, in memory of this object."""

import ctypes
from collections.abc import Sequence

from torch_ext.native import dtypes, library

_Pointer = ctypes.c_void_p
_Int64s = ctypes.POINTER(ctypes.c_int64)


class ReadyTracker:
    """Is told which gradients are ready; hands out complete buckets in ascending order, each once per cycle."""

    def __init__(self, names: Sequence[str], bucket_of: Sequence[int], n_buckets: int) -> None:
        self._n = n = len(names)
        bytes_of = library.function("tx_tracker_bytes", ctypes.c_int64, ctypes.c_int64, restype=ctypes.c_int64)
        size = bytes_of(n, n_buckets)
        self._memory = (ctypes.c_int64 * (size // 8 + 1))()
        self._names = (ctypes.c_char_p * max(1, n))(*map(dtypes.c_text, names))
        self._missing = (ctypes.c_int64 * max(1, n))()
        self._tracker = _Pointer()
        init = library.function(
            "tx_tracker_init",
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_int64,
            _Int64s,
            ctypes.c_int64,
            ctypes.POINTER(ctypes.c_char_p),
            ctypes.c_int32,
            ctypes.POINTER(_Pointer),
        )
        # Unused parameters are allowed here: whether a missing gradient is an error depends on the micro-batches before
        # and is agreed across ranks, which must all have sent their buckets by then.
        init(
            self._memory,
            ctypes.sizeof(self._memory),
            n,
            (ctypes.c_int64 * max(1, n))(*bucket_of),
            n_buckets,
            self._names,
            1,
            ctypes.byref(self._tracker),
        )
        self._complete = ctypes.c_int64()
        self._complete_at = ctypes.addressof(self._complete)
        # Called for each gradient: brief calls do not release the GIL, which worker threads would keep for a while.
        self._mark = library.function("tx_tracker_mark", _Pointer, ctypes.c_int64, _Pointer, brief=True)
        self._next = library.function("tx_tracker_next", _Pointer, restype=ctypes.c_int64, brief=True)
        self._finish = library.function("tx_tracker_finish", _Pointer, _Int64s, _Int64s)
        self._reset = library.function("tx_tracker_reset", _Pointer, restype=None)
        self._order = library.function("tx_tracker_order", _Pointer, _Int64s)

    def mark(self, param: int) -> bool:
        """The gradient is ready; whether it completed its bucket. RuntimeError where it was so before in this cycle."""
        self._mark(self._tracker, param, self._complete_at)
        return self._complete.value >= 0

    def next(self) -> int | None:
        """The next bucket to send, None while it is not complete."""
        bucket = self._next(self._tracker)
        return None if bucket < 0 else bucket

    def finish(self) -> list[int]:
        """Backward has ended: every bucket is complete now. The parameters without a gradient, ascending."""
        n = ctypes.c_int64()
        self._finish(self._tracker, self._missing, ctypes.byref(n))
        return list(self._missing[: n.value])

    def order(self) -> list[int]:
        """All parameters, in the order of their gradients in the first finished cycle; missing ones last."""
        order = (ctypes.c_int64 * max(1, len(self._names)))()
        self._order(self._tracker, order)
        return list(order)[: self._n]

    def reset(self) -> None:
        """A new cycle."""
        self._reset(self._tracker)
