"""The argument structs of the C function tx_adamw, for calls that do not go through torch's dispatcher.

A struct is filled once and passed to many calls. The memory that it points to must stay alive, at the same address, as
long as the struct is used.
"""

import ctypes
import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torch_ext.native import dtypes, library, structs


@structs.mirror("tx_tensor")
class TensorArgument(library.Struct):
    """tx_tensor: address, number of elements and dtype of contiguous memory."""


def argument(t: Tensor | None) -> TensorArgument:
    """Returns the memory of a dense CPU tensor, in memory order. None and tensors without elements give an all-zero
    struct, C's "none". Raises TypeError for other devices and for dtypes that the library does not know."""
    if t is None or t.numel() == 0:
        return TensorArgument()
    dtype = dtypes.code_of(t.dtype)
    if dtype is None or t.device.type != "cpu":
        raise TypeError(f"a tensor of {t.dtype} on {t.device}; dtypes of csrc/core/dtypes.def on the host are legal")
    return TensorArgument(t.data_ptr(), t.numel(), dtype)


def device_argument(t: Tensor) -> TensorArgument:
    """Returns the memory of a dense tensor on any device, in memory order."""
    return TensorArgument(t.data_ptr(), t.numel(), dtypes.code_of(t.dtype) or 0)


def counter(address: int) -> TensorArgument:
    """Returns a tensor of one int64 at this address."""
    return TensorArgument(address, 1, dtypes.code_of(torch.int64))


def arguments(tensors: Sequence[Tensor | None]) -> "ctypes.Array[TensorArgument]":
    return (TensorArgument * len(tensors))(*map(argument, tensors))


@structs.mirror("tx_adamw_args", addresses=True)
class AdamWArguments(library.Struct):
    """tx_adamw_args. Pointers are plain addresses. The struct keeps alive the arrays that `point` sets; for any other
    pointer, its caller must keep the memory alive."""

    def __init__(self, n: int) -> None:
        """Sets `size` and the number of parameters n; everything else is zero."""
        super().__init__(ctypes.sizeof(AdamWArguments), n)
        self._kept: dict[str, object] = {}

    def point(self, name: str, tensors: Sequence[Tensor | None]) -> None:
        """Points the field `name` at an array with one tensor for each parameter or group; NULL if all are None."""
        wanted = any(t is not None for t in tensors)
        self._kept[name] = array = arguments(tensors if wanted else [])
        setattr(self, name, ctypes.addressof(array) if wanted else None)

    def point_states(self, rows: Sequence[Sequence[Tensor | None]]) -> None:
        """Sets the fields of the optimizer states. rows: one per parameter, in the order of a row of adamw_flat_'s
        `slices`; the last columns may be left out."""
        for name, tensors in zip(_STATES, zip(*rows, strict=True), strict=False):
            self.point(name, tensors)


_STATES = (
    *("exp_avgs", "exp_avg_sqs", "masters", "scales", "steps", "checksums"),
    *("changed", "moved", "distances", "emas", "healths", "ema_lows"),
)


@functools.cache
def adamw_check() -> Callable[[int, int], int]:
    """Returns tx_adamw_check, which takes the addresses of AdamWArguments and of a library.Error, and returns the
    status."""
    return library.function("tx_adamw_check", *[ctypes.c_void_p] * 2, restype=ctypes.c_int32, keep_gil=True)


@functools.cache
def adamw() -> Callable[[int, None, int], int]:
    """Returns tx_adamw, which takes the addresses of AdamWArguments and of a library.Error (None between them) and
    returns the status, for library.check. It runs on the calling thread and releases the GIL."""
    return library.function("tx_adamw", *[ctypes.c_void_p] * 3, restype=ctypes.c_int32)
