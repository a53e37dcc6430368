"""The C functions of csrc/torch_ext_delta.h, which read and write deltas: mirrors of their structs, and their calls."""

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
"""A message: bytes-like, or a tensor of uint8 on the host."""

_Pointer, _Int32, _Int64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


@structs.mirror("tx_delta_param")
class DeltaParam(library.Struct):
    """A row of the table of parameters."""


@structs.mirror("tx_delta_piece", addresses=True)
class DeltaPiece(library.Struct):
    """A rectangle of a parameter and where it lies."""


@structs.mirror("tx_delta_chain")
class DeltaChain(library.Struct):
    """Where a rank's part of a chain stands."""


@structs.mirror("tx_delta_run")
class DeltaRun(library.Struct):
    """Elements of a parameter, and what the publisher keeps beside them."""


@structs.mirror("tx_delta_written")
class DeltaWritten(library.Struct):
    """Weights, and what tells whether somebody else wrote to them."""


@structs.mirror("tx_delta_message")
class DeltaMessage(library.Struct):
    """Memory of the library."""


@structs.mirror("tx_delta_encode_args")
class DeltaEncodeArguments(library.Struct):
    """What tx_delta_encode makes."""


def table(params: Sequence[tuple[str, int, torch.dtype]]) -> "ctypes.Array[DeltaParam]":
    """Names, elements and dtypes, in ascending order of the names' bytes."""
    rows = [DeltaParam(dtypes.c_text(name), numel, dtypes.code_of(dtype) or 0) for name, numel, dtype in params]
    return (DeltaParam * len(rows))(*rows)


def in_order(name: str) -> bytes:
    """The key by which names are sorted in a table."""
    return dtypes.c_text(name)


def pieces(rows: Sequence[tuple[int, Piece]]) -> "ctypes.Array[DeltaPiece]":
    """Each with its parameter's index in the table."""
    found = [
        DeltaPiece(param, p.first, p.rows, p.columns, p.step, p.address or None, p.row_stride, p.column_stride)
        for param, p in rows
    ]
    return (DeltaPiece * len(found))(*found)


@contextmanager
def messages(given: Sequence[Bytes]) -> Iterator["ctypes.Array[TensorArgument]"]:
    """As the library takes them. Bytes that nobody may write to are not copied."""
    kept = [_lent(one) for one in given]
    yield (TensorArgument * len(kept))(*(argument for argument, _ in kept))
    del kept


def _lent(message: Bytes) -> tuple[TensorArgument, object]:
    """The argument, and what its memory belongs to."""
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


def taken(message: DeltaMessage) -> bytes:
    """Its bytes; the library's memory is freed."""
    try:
        return ctypes.string_at(message.data, message.bytes) if message.bytes else b""
    finally:
        _free()(ctypes.byref(message))


@functools.cache
def _free() -> Callable[..., None]:
    return library.function("tx_delta_free", _Pointer, restype=None, brief=True)


def call(name: str, *arguments: Any) -> None:
    """tx_delta_<name>; structs and arrays are passed by address, a TensorArgument by value. ValueError, TypeError,
    RuntimeError or MemoryError, with the library's message."""
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
"""Of each function, without the tx_error."""


@functools.cache
def _function(name: str) -> Callable[..., None]:
    return library.function(f"tx_delta_{name}", *_ARGUMENTS[name])


@functools.cache
def brief(name: str, restype: Any) -> Callable[[int], Any]:
    """A function of a receiver that only looks, or frees it."""
    return library.function(f"tx_delta_{name}", _Pointer, restype=restype, brief=True)
