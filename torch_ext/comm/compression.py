"""Lossless compression of bf16 messages to three quarters of their bytes (tx_compress of C), for slow links.

A message's length depends on its number of elements alone, so that both ends know it; data too disordered for it
follows uncompressed (`rest`). Both ends agree on compression beforehand (`Communicator.compresses`).
"""

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from torch_ext.native import library
from torch_ext.native.adamw_args import TensorArgument, argument
from torch_ext.policy import policy_struct
from torch_ext.policy.policy import Policy

_LEAST = 4096  # elements; what is shorter takes as long as an empty message


@functools.cache
def _bytes() -> Callable[[int], int]:
    return library.function("tx_compressed_bytes", ctypes.c_int64, restype=ctypes.c_int64, brief=True)


@functools.cache
def _of_c(name: str) -> Callable[..., None]:
    return library.function(name, TensorArgument, TensorArgument, ctypes.POINTER(ctypes.c_int64))


def size(numel: int, dtype: torch.dtype) -> int:
    """Bytes of the compressed message of so many elements; 0: they are sent as they are."""
    return _bytes()(numel) if dtype == torch.bfloat16 and numel >= _LEAST else 0


def compress(values: Tensor, message: Tensor) -> int:
    """Compresses values into the message (uint8, of their `size`, not 0). Returns how many bytes at the end of values
    must follow uncompressed. Both contiguous, in host memory. Any thread."""
    rest = ctypes.c_int64()
    _of_c("tx_compress")(argument(values), argument(message), ctypes.byref(rest))
    return rest.value


def expand(message: Tensor, values: Tensor) -> int:
    """Expands a message into values. Returns how many bytes at the end of values follow uncompressed. RuntimeError
    for a damaged message."""
    rest = ctypes.c_int64()
    _of_c("tx_expand")(argument(message), argument(values), ctypes.byref(rest))
    return rest.value


def end_of(values: Tensor, rest: int) -> Tensor:
    """A view of the last `rest` bytes of values."""
    whole = values.view(torch.uint8)
    return whole[whole.numel() - rest :]


def decided(policy: Policy, link_gbps: float | None) -> bool:
    """Whether messages are compressed over links that carry so many Gbit/s; None: that is not known."""
    choices = next(row.choices for row in policy_struct.rows() if row.name == "grad_comm_compression")
    compresses = library.function("tx_compresses", ctypes.c_int32, ctypes.c_double, restype=ctypes.c_int32, brief=True)
    return bool(compresses(choices.index(policy.grad_comm_compression), link_gbps or 0.0))


def refuse(policy: Policy, possible: bool) -> None:
    """ValueError where compression is certain and not possible."""
    if policy.grad_comm_compression == "on" and not possible:
        raise ValueError(
            "grad_comm_compression='on': messages are compressed on the host, over gloo; 'auto' and 'off' are legal "
            "here, and mean no compression"
        )
