"""The library's tx_adamw_offloaded: mirrors of its structs, and torch's threads."""

import ctypes
import functools
from collections.abc import Callable

from torch_ext.native import library as native_library

_Pointer, _Int64, _Int32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32

# Functions of tx_copy_ops: the context first, the tx_error last.
COPY = ctypes.CFUNCTYPE(_Int32, _Pointer, _Int32, _Pointer, _Pointer, _Int64, _Pointer)
MARK = ctypes.CFUNCTYPE(_Int32, _Pointer, _Int32, _Int64, _Pointer)
FOLLOW = ctypes.CFUNCTYPE(_Int32, _Pointer, _Int64, _Pointer)


class CopyOps(native_library.Struct):
    c_name = "tx_copy_ops"
    _fields_ = [
        ("size", ctypes.c_uint64),
        ("ctx", _Pointer),
        ("copy", COPY),
        ("mark", MARK),
        ("wait", MARK),
        ("follow", FOLLOW),
    ]


class Staging(native_library.Struct):
    c_name = "tx_staging"
    _fields_ = [
        ("size", ctypes.c_uint64),
        ("lanes", _Pointer),
        ("memory", _Pointer),
        ("bytes", _Int64),
        ("batch", _Int64),
        ("slots", _Int32),
        ("reserved", _Int32),
    ]


class Threads(native_library.Struct):
    c_name = "tx_parallel"
    _fields_ = [("size", ctypes.c_uint64), ("num_threads", _Int64), ("ctx", _Pointer), ("run", _Pointer)]


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
