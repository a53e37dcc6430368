"""Mirrors of the structs of the library's tx_adamw_offloaded, and torch's thread pool for it."""

import ctypes
import functools
from collections.abc import Callable

from torch_ext.native import library as native_library
from torch_ext.native import structs

_Pointer, _Int64, _Int32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32

# Functions of tx_copy_ops: the context first, the tx_error last.
COPY = ctypes.CFUNCTYPE(_Int32, _Pointer, _Int32, _Pointer, _Pointer, _Int64, _Pointer)
MARK = ctypes.CFUNCTYPE(_Int32, _Pointer, _Int32, _Int64, _Pointer)
FOLLOW = ctypes.CFUNCTYPE(_Int32, _Pointer, _Int64, _Pointer)


@structs.mirror("tx_copy_ops", copy=COPY, mark=MARK, wait=MARK, follow=FOLLOW)
class CopyOps(native_library.Struct):
    """How parameters and gradients are copied."""


@structs.mirror("tx_staging", addresses=True)
class Staging(native_library.Struct):
    """The memory that batches are in while they are stepped."""


@structs.mirror("tx_parallel")
class Threads(native_library.Struct):
    """The threads that the library uses: the caller's."""


def threads() -> Threads:
    """Returns torch's thread pool, with its current number of threads."""
    found = Threads()
    _torch_parallel()(ctypes.byref(found))
    return found


@functools.cache
def _torch_parallel() -> Callable[..., None]:
    return native_library.function("tx_torch_parallel", ctypes.POINTER(Threads))


@functools.cache
def adamw_offloaded() -> Callable[[int, int, int, int], int]:
    """Returns tx_adamw_offloaded. It takes the addresses of AdamWArguments, a Staging, Threads and an Error, runs
    without the GIL, and returns the status for native_library.check."""
    return native_library.function("tx_adamw_offloaded", *[_Pointer] * 4, restype=_Int32)
