"""Loads libtorch_ext.so, and calls its C functions.

The library is one file for every Python and every torch >= 2.10: plain C, called through ctypes. Nothing here knows
what a function does; a module that needs one declares it with `function` and mirrors its structs with
`structs.mirror`.
"""

import ctypes
import functools
from collections.abc import Callable
from typing import Any

from torch_ext.native import constants, paths


class Struct(ctypes.Structure):
    """A mirror of the C struct named `c_name`; tests/torch/test_abi.py compares every field with the header."""

    c_name: str


class Error(Struct):
    """tx_error: the message of a call that failed."""

    c_name = "tx_error"
    _fields_ = [("message", ctypes.c_char * 1024)]

    @property
    def text(self) -> str:
        return self.message.decode("utf-8", "replace")


class Status:
    """The `restype` of functions that return a tx_status and take a tx_error last."""


# By the hundreds of tx_status, with the exceptions to the rule first.
_EXCEPTIONS: dict[int, type[Exception]] = {
    constants.ERROR_DTYPE: TypeError,
    constants.ERROR_DEVICE: RuntimeError,
    constants.ERROR_BAD_STATE: RuntimeError,
    constants.ERROR_OUT_OF_MEMORY: MemoryError,
}
_EXCEPTIONS_BY_GROUP: dict[int, type[Exception]] = {1: ValueError, 2: ValueError, 3: RuntimeError}


def check(status: int, error: Error) -> None:
    """Raises what fits the status, with the library's message; nothing for TX_OK."""
    if status:
        kind = _EXCEPTIONS.get(status) or _EXCEPTIONS_BY_GROUP.get(status // 100, RuntimeError)
        raise kind(error.text)


@functools.cache
def function(name: str, *argtypes: Any, restype: Any = Status, brief: bool = False) -> Callable[..., Any]:
    """The C function `name` as a Python callable, made once.

    brief: it takes a microsecond or so, and keeps the interpreter's lock; others let it go, and a thread that lets it
    go for no more than that may have to wait a hundred times as long until it has it again.

    With the default restype the function's last C parameter is the tx_error: leave it out of `argtypes` and of calls; a
    status other than TX_OK raises ValueError, TypeError (dtypes), MemoryError or RuntimeError with the message.
    Raises ImportError where the library has no such function.
    """
    try:
        symbol = (_library_with_lock() if brief else _library())[name]
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
    """What to raise where this package calls something that the library lacks."""
    return ImportError(
        f"{paths.library_path()} has no {name}: it was built from other sources than the package in {paths.PACKAGE}. "
        "Build it again with `bazel build //:torch_ext`, or install the wheel anew."
    )


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(paths.library_path())


@functools.cache
def _library_with_lock() -> ctypes.PyDLL:
    return ctypes.PyDLL(paths.library_path())


def register() -> None:
    """Registers the operators with the torch that is imported; once per process, later calls do nothing.

    Raises ImportError where torch is not imported, or too old: the message names the symbol it lacks.
    """
    try:
        function("tx_torch_register")()
    except RuntimeError as refusal:
        raise ImportError(f"torch_ext: {refusal}") from None


def version() -> str:
    """Of the library that is loaded, "major.minor.patch": csrc/torch_ext_types.h's TX_VERSION_*."""
    number = function("tx_version", restype=ctypes.c_uint32)()
    return f"{number >> 16}.{number >> 8 & 0xFF}.{number & 0xFF}"


def operators() -> dict[str, str]:
    """Name ("adamw_") -> schema ("adamw_(Tensor(a!)[] params, ...) -> ()"), in the order of the C table."""
    name_of = function("tx_operator_name", ctypes.c_int32, restype=ctypes.c_char_p)
    schema_of = function("tx_operator_schema", ctypes.c_int32, restype=ctypes.c_char_p)
    table: dict[str, str] = {}
    while name := name_of(len(table)):
        table[name.decode()] = schema_of(len(table)).decode()
    return table


def __getattr__(name: str) -> ctypes.CDLL:
    """`lib`: the loaded library, for functions without a wrapper."""
    if name == "lib":
        return _library()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
