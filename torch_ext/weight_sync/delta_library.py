"""Calls the C functions of csrc/torch_ext_delta.h, which read and write deltas, and mirrors their structs."""

import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor

from torch_ext.native import dtypes, library, structs
from torch_ext.native.adamw_args import TensorArgument
from torch_ext.weight_sync.weight_slice import Piece

Bytes: TypeAlias = bytes | bytearray | memoryview | Tensor
"""A delta: a bytes-like object, or a tensor of uint8 on the host."""

_Pointer, _Int32, _Int64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


@structs.mirror("tx_delta_param")
class DeltaParam(library.Struct):
    """A row of the table of parameters: name, number of elements, dtype."""


@structs.mirror("tx_delta_piece", addresses=True)
class DeltaPiece(library.Struct):
    """A rectangle of a parameter and its place in an engine's memory."""


@structs.mirror("tx_delta_chain")
class DeltaChain(library.Struct):
    """The current version of a rank's part of a chain, and the chain's id."""


@structs.mirror("tx_delta_run")
class DeltaRun(library.Struct):
    """A run of a parameter's elements, and the publisher's records about them."""


@structs.mirror("tx_delta_written")
class DeltaWritten(library.Struct):
    """Weights, and the masters or checksums that show whether other code wrote to them."""


@structs.mirror("tx_delta_message")
class DeltaMessage(library.Struct):
    """A message in memory of the library."""


@structs.mirror("tx_delta_encode_args")
class DeltaEncodeArguments(library.Struct):
    """The arguments of tx_delta_encode: what it encodes."""


def table(params: Sequence[tuple[str, int, torch.dtype]]) -> "ctypes.Array[DeltaParam]":
    """Returns a table of parameters. params: keys, numbers of elements and dtypes, already sorted by `in_order`."""
    rows = [DeltaParam(dtypes.c_text(name), numel, dtypes.code_of(dtype) or 0) for name, numel, dtype in params]
    return (DeltaParam * len(rows))(*rows)


def in_order(name: str) -> bytes:
    """Returns the sort key of a name in a table: its bytes."""
    return dtypes.c_text(name)


def pieces(rows: Sequence[tuple[int, Piece]]) -> "ctypes.Array[DeltaPiece]":
    """Returns pieces as an array. rows: each piece with its parameter's index in the table."""
    found = [
        DeltaPiece(param, p.first, p.rows, p.columns, p.step, p.address or None, p.row_stride, p.column_stride)
        for param, p in rows
    ]
    return (DeltaPiece * len(found))(*found)


@contextmanager
def messages(given: Sequence[Bytes]) -> Iterator["ctypes.Array[TensorArgument]"]:
    """Yields messages as an array for the library, valid inside the context. They are not copied, except memoryviews
    that are read-only or not contiguous."""
    kept = [_argument_of(one) for one in given]
    yield (TensorArgument * len(kept))(*(argument for argument, _ in kept))
    del kept


def _argument_of(message: Bytes) -> tuple[TensorArgument, object]:
    """Returns the argument, and the object that keeps its memory alive."""
    code = dtypes.code_of(torch.uint8)
    if isinstance(message, Tensor):
        if message.dtype != torch.uint8 or message.device.type != "cpu" or not message.is_contiguous():
            raise ValueError(f"a delta is a tensor in {message.dtype} on {message.device}; uint8 on the host is legal")
        return TensorArgument(message.data_ptr(), message.numel(), code), message
    if not isinstance(message, bytes | bytearray | memoryview):
        raise ValueError(f"a delta is a {type(message).__name__}; bytes-like objects and tensors of uint8 are legal")
    if isinstance(message, memoryview) and (message.readonly or not message.contiguous):
        message = bytes(message)
    if isinstance(message, bytes):
        address = ctypes.cast(ctypes.c_char_p(message), _Pointer).value if message else None
        return TensorArgument(address, len(message), code), message
    view = memoryview(message).cast("B")
    memory = (ctypes.c_char * len(view)).from_buffer(view)
    return TensorArgument(ctypes.addressof(memory) if len(view) else None, len(view), code), memory


def take_bytes(message: DeltaMessage) -> bytes:
    """Returns the message's bytes and frees the library's memory."""
    try:
        return ctypes.string_at(message.data, message.bytes) if message.bytes else b""
    finally:
        _free()(ctypes.byref(message))


@functools.cache
def _free() -> Callable[..., None]:
    return library.function("tx_delta_free", _Pointer, restype=None, keep_gil=True)


def call(name: str, *arguments: Any) -> None:
    """Calls tx_delta_<name>. Structs and arrays are passed by address, a TensorArgument by value. Raises ValueError,
    TypeError, RuntimeError or MemoryError, with the library's message."""
    _function(name)(*(one if isinstance(one, TensorArgument) else _address(one) for one in arguments))


def _address(one: Any) -> Any:
    return ctypes.addressof(one) if isinstance(one, ctypes.Structure | ctypes.Array) else one


_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "chain_begin": (_Int64, _Pointer, _Pointer, _Int32, _Int32, _Pointer),
    "mark": (_Int64, _Pointer, _Pointer),
    "renew": (_Int64, _Pointer, _Pointer),
    "encode": (_Pointer, _Pointer, _Pointer, _Pointer),
    "merge": (_Int64, _Pointer, _Pointer),
    "info_of": (TensorArgument, _Pointer),
    "params_of": (TensorArgument, _Int64, _Pointer),
    "open": (_Int64, _Pointer, _Int64, _Pointer, _Pointer),
    "apply": (_Pointer, _Int64, _Pointer, _Int32, _Pointer),
}
"""Argument types of each function, without the tx_error."""


@functools.cache
def _function(name: str) -> Callable[..., None]:
    return library.function(f"tx_delta_{name}", *_ARGUMENTS[name])


@functools.cache
def receiver_function(name: str, restype: Any) -> Callable[[int], Any]:
    """Returns tx_delta_<name>, a quick function of a receiver that returns no status."""
    return library.function(f"tx_delta_{name}", _Pointer, restype=restype, keep_gil=True)
