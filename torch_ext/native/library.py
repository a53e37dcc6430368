"""Loads libtorch_ext.so and calls its C functions.

The library is one file for every Python and every torch >= 2.10: plain C, called through ctypes. This module knows no
particular function. A module that needs a C function declares it with `function`, and its structs with
`structs.mirror`.
"""

import ctypes
import functools
from collections.abc import Callable
from typing import Any

from torch_ext.native import constants, paths


class Struct(ctypes.Structure):
    """Base of the mirrors of C structs. `c_name` is the struct's name in C; tests/torch/test_abi.py compares every
    field with the header."""

    c_name: str


class Error(Struct):
    """tx_error, the message of a failed call."""

    c_name = "tx_error"
    _fields_ = [("message", ctypes.c_char * 1024)]

    @property
    def text(self) -> str:
        return self.message.decode("utf-8", "replace")


class Status:
    """The `restype` of functions that return a tx_status and take a tx_error last."""


# The hundreds of a tx_status give the exception's type; _EXCEPTIONS has the statuses that deviate from that.
_EXCEPTIONS: dict[int, type[Exception]] = {
    constants.ERROR_DTYPE: TypeError,
    constants.ERROR_DEVICE: RuntimeError,
    constants.ERROR_BAD_STATE: RuntimeError,
    constants.ERROR_OUT_OF_MEMORY: MemoryError,
}
_EXCEPTIONS_BY_GROUP: dict[int, type[Exception]] = {1: ValueError, 2: ValueError, 3: RuntimeError}


def check(status: int, error: Error) -> None:
    """Raises the exception that belongs to the status, with the library's message; does nothing for TX_OK."""
    if status:
        kind = _EXCEPTIONS.get(status) or _EXCEPTIONS_BY_GROUP.get(status // 100, RuntimeError)
        raise kind(error.text)


@functools.cache
def function(name: str, *argtypes: Any, restype: Any = Status, keep_gil: bool = False) -> Callable[..., Any]:
    """Returns the C function `name` as a Python callable (cached).

    keep_gil: keep the GIL during the call. For functions that take about a microsecond: a thread that released the GIL
    for so short a time may wait a hundred times as long to get it back. All other functions release the GIL.

    With the default restype the function's last C parameter is the tx_error: leave it out of `argtypes` and of calls; a
    status other than TX_OK raises ValueError, TypeError (dtypes), MemoryError or RuntimeError with the message.
    Raises ImportError if the library has no such function.
    """
    try:
        symbol = (_library_with_lock() if keep_gil else _library())[name]
    except AttributeError:
        raise other_build(name) from None
    if restype is not Status:
        symbol.argtypes, symbol.restype = argtypes, restype
        return symbol
    symbol.argtypes, symbol.restype = (*argtypes, ctypes.POINTER(Error)), ctypes.c_int32

    @functools.wraps(symbol, assigned=())
    def call(*arguments: Any) -> None:
        error = Error()
        check(symbol(*arguments, ctypes.byref(error)), error)

    call.__name__ = name
    return call


def other_build(name: str) -> ImportError:
    """Returns the error for a function, struct or operator that the loaded library lacks."""
    return ImportError(
        f"{paths.library_path()} has no {name}: it was built from other sources than the package in {paths.PACKAGE}. "
        "Build it again with `bazel build //:torch_ext`, or reinstall the wheel."
    )


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(paths.library_path())


@functools.cache
def _library_with_lock() -> ctypes.PyDLL:
    return ctypes.PyDLL(paths.library_path())


def register() -> None:
    """Registers the operators with the imported torch. Only the first call in a process does anything.

    Raises ImportError if torch is not imported, or too old: the message names the symbol that it lacks.
    """
    try:
        function("tx_torch_register")()
    except RuntimeError as refusal:
        raise ImportError(f"torch_ext: {refusal}") from None


def version() -> str:
    """Returns the loaded library's version, "major.minor.patch" (TX_VERSION_* of csrc/torch_ext_types.h)."""
    number = function("tx_version", restype=ctypes.c_uint32)()
    return f"{number >> 16}.{number >> 8 & 0xFF}.{number & 0xFF}"


def operators() -> dict[str, str]:
    """Returns operator name ("adamw_") -> schema ("adamw_(Tensor(a!)[] params, ...) -> ()"), in C's order."""
    name_of = function("tx_operator_name", ctypes.c_int32, restype=ctypes.c_char_p)
    schema_of = function("tx_operator_schema", ctypes.c_int32, restype=ctypes.c_char_p)
    table: dict[str, str] = {}
    while name := name_of(len(table)):
        table[name.decode()] = schema_of(len(table)).decode()
    return table


def __getattr__(name: str) -> ctypes.CDLL:
    """Returns the loaded library as `lib`, for functions without a wrapper."""
    if name == "lib":
        return _library()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
