"""Lossless compression of bf16 messages to three quarters of their bytes (C's tx_compress), for slow links.

The length of a compressed message depends only on its number of elements, so that the receiver knows it. Data that is
too irregular to fit follows uncompressed (`rest`). Both ranks agree beforehand whether to compress
(`Communicator.compresses`).
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

_LEAST = 4096  # elements; a shorter message takes as long as an empty one, so compressing it gains nothing


@functools.cache
def _bytes() -> Callable[[int], int]:
    return library.function("tx_compressed_bytes", ctypes.c_int64, restype=ctypes.c_int64, keep_gil=True)


@functools.cache
def _c_function(name: str) -> Callable[..., None]:
    return library.function(name, TensorArgument, TensorArgument, ctypes.POINTER(ctypes.c_int64))


def size(numel: int, dtype: torch.dtype) -> int:
    """Returns the bytes of a compressed message of so many elements; 0: they are sent uncompressed."""
    return _bytes()(numel) if dtype == torch.bfloat16 and numel >= _LEAST else 0


def compress(values: Tensor, message: Tensor) -> int:
    """Compresses values into the message (uint8, of the values' `size`, which is not 0). Returns how many bytes at the
    end of values must follow uncompressed. Both tensors are contiguous, in host memory. Callable on any thread."""
    rest = ctypes.c_int64()
    _c_function("tx_compress")(argument(values), argument(message), ctypes.byref(rest))
    return rest.value


def expand(message: Tensor, values: Tensor) -> int:
    """Expands a message into values. Returns how many bytes at the end of values follow uncompressed. Raises
    RuntimeError for a damaged message."""
    rest = ctypes.c_int64()
    _c_function("tx_expand")(argument(message), argument(values), ctypes.byref(rest))
    return rest.value


def end_of(values: Tensor, rest: int) -> Tensor:
    """Returns a view of the last `rest` bytes of values."""
    whole = values.view(torch.uint8)
    return whole[whole.numel() - rest :]


def is_on(policy: Policy, link_gbps: float | None) -> bool:
    """Whether messages are compressed over links of so many Gbit/s; None: the bandwidth is unknown."""
    choices = next(row.choices for row in policy_struct.rows() if row.name == "grad_comm_compression")
    compresses = library.function(
        "tx_compresses", ctypes.c_int32, ctypes.c_double, restype=ctypes.c_int32, keep_gil=True
    )
    return bool(compresses(choices.index(policy.grad_comm_compression), link_gbps or 0.0))


def refuse(policy: Policy, possible: bool) -> None:
    """Raises ValueError if the policy demands compression and it is not possible."""
    if policy.grad_comm_compression == "on" and not possible:
        raise ValueError(
            "grad_comm_compression='on': messages are compressed on the host, over gloo; 'auto' and 'off' are legal "
            "here, and mean no compression"
        )
