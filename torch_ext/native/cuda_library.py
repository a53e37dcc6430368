"""Finds libtorch_ext_cuda.so and says what it was built for, and whether a device of this machine can run it."""

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch_ext.native import library


class _AboutThis(library.Struct):
    c_name = "tx_cuda_about"
    _fields_ = [
        ("size", ctypes.c_uint64),
        ("runtime_version", ctypes.c_int32),
        ("driver_version", ctypes.c_int32),
        ("n_devices", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("architectures", ctypes.c_char * 64),
        ("why_not", ctypes.c_char * 1024),
    ]


class About(NamedTuple):
    """What the CUDA library was built for, and what it found on this machine."""

    path: str
    built_with: str  # "13.0"
    driver: str  # the newest CUDA version that the driver supports; empty: there is no driver
    devices: int
    architectures: str
    why_not: str  # why no device can be used; empty where one can


def path() -> str:
    """Loads the library and returns its path. Raises RuntimeError that says where it was searched for and how to get
    it, or what is wrong with the file."""
    found = ctypes.create_string_buffer(4096)
    library.function("tx_torch_cuda_library", ctypes.c_char_p, ctypes.c_int64)(found, len(found))
    return found.value.decode()


def about() -> About:
    """Returns what the library says of itself and of the driver. Raises RuntimeError as `path` does."""
    where = path()
    what, error = _AboutThis(size=ctypes.sizeof(_AboutThis)), library.Error()
    library.check(ctypes.CDLL(where).tx_cuda_about_this(ctypes.byref(what), ctypes.byref(error)), error)
    return About(
        where,
        _dotted(what.runtime_version),
        _dotted(what.driver_version) if what.driver_version else "",
        what.n_devices,
        what.architectures.decode(),
        what.why_not.decode(),
    )


@contextlib.contextmanager
def relaxed() -> Iterator[None]:
    """Context in which this thread may query CUDA events while another thread captures a CUDA graph.

    In the "global" capture mode, torch's default, such a query would otherwise invalidate the capture. Only for events
    of work that is not captured itself. Raises RuntimeError as `path` does."""
    exchange = _exchange_capture_mode()
    mode, error = ctypes.c_int32(_RELAXED), library.Error()
    library.check(exchange(ctypes.byref(mode), ctypes.byref(error)), error)
    try:
        yield
    finally:
        library.check(exchange(ctypes.byref(mode), ctypes.byref(error)), error)


_RELAXED = 2  # cudaStreamCaptureModeRelaxed


@functools.cache
def _exchange_capture_mode() -> Callable[..., int]:
    exchange: Callable[..., int] = ctypes.CDLL(path()).tx_cuda_exchange_capture_mode
    return exchange


def _dotted(version: int) -> str:
    """Returns "13.0" for CUDA's number 13000."""
    return f"{version // 1000}.{version % 1000 // 10}"
