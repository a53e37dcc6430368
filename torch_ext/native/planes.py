"""Lossless compression of tensors, which shortens their exponents: tx_planes_encode and tx_planes_decode
(csrc/torch_ext_compress.h).

Tensors are contiguous, on the CPU. The calls release the GIL.
"""

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_ext.native import dtypes, library, structs
from torch_ext.native.adamw_args import TensorArgument

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int16, torch.uint8)
"""The dtypes that can be encoded."""


@structs.mirror("tx_planes")
class _Planes(library.Struct):
    numel: int
    bytes: int
    n_blocks: int
    dtype: int


class Message(NamedTuple):
    """The contents of a message's header."""

    dtype: torch.dtype
    numel: int
    blocks: int


def _c(t: Tensor) -> TensorArgument:
    assert t.is_contiguous() and t.device.type == "cpu"
    return TensorArgument(t.data_ptr(), t.numel(), dtypes.code_of(t.dtype) or 0)


def bound(dtype: torch.dtype, numel: int) -> int:
    """Returns a number of bytes that suffices for any message of `numel` elements."""
    found = library.function("tx_planes_bound", ctypes.c_int32, ctypes.c_int64, restype=ctypes.c_int64, keep_gil=True)
    return int(found(dtypes.code_of(dtype), numel))


def encode(values: Tensor) -> Tensor:
    """Returns the message as a uint8 tensor of exactly its length."""
    out, length = torch.empty(bound(values.dtype, values.numel()), dtype=torch.uint8, device="cpu"), ctypes.c_int64()
    call = library.function("tx_planes_encode", TensorArgument, TensorArgument, ctypes.c_void_p)
    call(_c(values), _c(out), ctypes.byref(length))
    return out[: length.value].clone()


def read(message: Tensor) -> Message:
    """Returns the header. Raises RuntimeError if it is damaged, the message is truncated, or this is no message. The
    blocks are not checked."""
    found: Any = _Planes(size=ctypes.sizeof(_Planes))
    library.function("tx_planes_read", TensorArgument, ctypes.c_void_p)(_c(message), ctypes.byref(found))
    dtype = dtypes.dtype_of(found.dtype)
    assert dtype is not None
    return Message(dtype, found.numel, found.n_blocks)


def check(message: Tensor) -> None:
    """Raises RuntimeError, naming the block, if a block does not match its checksum."""
    call = library.function("tx_planes_check", TensorArgument, ctypes.c_int64, ctypes.c_int64)
    call(_c(message), 0, read(message).blocks)


def decode(message: Tensor, begin: int, values: Tensor) -> None:
    """Decodes the elements from `begin` on into `values`. Raises RuntimeError if the message is damaged, ValueError if
    it has fewer elements."""
    call = library.function("tx_planes_decode_range", TensorArgument, ctypes.c_int64, TensorArgument)
    call(_c(message), begin, _c(values))
