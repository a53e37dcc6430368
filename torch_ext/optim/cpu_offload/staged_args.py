"""The library's tx_adamw_offloaded: mirrors of its structs, and torch's threads."""

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
    """Where batches are while they are stepped."""


@structs.mirror("tx_parallel")
class Threads(native_library.Struct):
    """The caller's threads."""


def threads() -> Threads:
    """torch's, as many as it has now."""
    found = Threads()
    _torch_parallel()(ctypes.byref(found))
    return found


@functools.cache
def _torch_parallel() -> Callable[..., None]:
    return native_library.function("tx_torch_parallel", ctypes.POINTER(Threads))


@functools.cache
def adamw_offloaded() -> Callable[[int, int, int, int], int]:
    """tx_adamw_offloaded: takes the addresses of AdamWArguments, of a Staging, of Threads and of an Error,
    and runs without the interpreter's lock. Returns the status, for native_library.check."""
    return native_library.function("tx_adamw_offloaded", *[_Pointer] * 4, restype=_Int32)
