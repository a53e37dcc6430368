"""The arguments of the library's tx_adamw, for who calls it without torch.

Arguments are made once and called many times; what they point to must stay as long as they are used, and where it is.
"""

import ctypes
import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torch_ext.native import dtypes, library, structs


@structs.mirror("tx_tensor")
class TensorArgument(library.Struct):
    """A flat run of elements."""


def argument(t: Tensor | None) -> TensorArgument:
    """A dense tensor on the host, in memory order. None, or one without elements: "none"."""
    if t is None or t.numel() == 0:
        return TensorArgument()
    dtype = dtypes.code_of(t.dtype)
    if dtype is None or t.device.type != "cpu":
        raise TypeError(f"a tensor of {t.dtype} on {t.device}; dtypes of csrc/core/dtypes.def on the host are legal")
    return TensorArgument(t.data_ptr(), t.numel(), dtype)


def elsewhere(t: Tensor) -> TensorArgument:
    """A dense tensor in memory order, on any device."""
    return TensorArgument(t.data_ptr(), t.numel(), dtypes.code_of(t.dtype) or 0)


def counter(address: int) -> TensorArgument:
    """An int64 there."""
    return TensorArgument(address, 1, dtypes.code_of(torch.int64))


def arguments(tensors: Sequence[Tensor | None]) -> "ctypes.Array[TensorArgument]":
    return (TensorArgument * len(tensors))(*map(argument, tensors))


@structs.mirror("tx_adamw_args", addresses=True)
class AdamWArguments(library.Struct):
    """Pointers are addresses: whoever sets one keeps what it points to, unless `point` does."""

    def __init__(self, n: int) -> None:
        """Of n parameters; everything else is zero."""
        super().__init__(ctypes.sizeof(AdamWArguments), n)
        self._kept: dict[str, object] = {}

    def point(self, name: str, tensors: Sequence[Tensor | None]) -> None:
        """Sets a list of tensors, one for each parameter or group; NULL where there is none."""
        wanted = any(t is not None for t in tensors)
        self._kept[name] = array = arguments(tensors if wanted else [])
        setattr(self, name, ctypes.addressof(array) if wanted else None)

    def point_states(self, rows: Sequence[Sequence[Tensor | None]]) -> None:
        """The state of each parameter, in the order of a row of `slices` of adamw_flat_, whose last columns may be left
        out."""
        for name, tensors in zip(_STATES, zip(*rows, strict=True), strict=False):
            self.point(name, tensors)


_STATES = (
    *("exp_avgs", "exp_avg_sqs", "masters", "scales", "steps", "checksums"),
    *("changed", "moved", "distances", "emas", "healths", "ema_lows"),
)


@functools.cache
def adamw_check() -> Callable[[int, int], int]:
    """tx_adamw_check: takes the addresses of AdamWArguments and of a library.Error. Returns the status."""
    return library.function("tx_adamw_check", *[ctypes.c_void_p] * 2, restype=ctypes.c_int32, brief=True)


@functools.cache
def adamw() -> Callable[[int, None, int], int]:
    """tx_adamw: takes the addresses of AdamWArguments and of a library.Error, and runs on this thread, without the
    interpreter's lock. Returns the status, for library.check."""
    return library.function("tx_adamw", *[ctypes.c_void_p] * 3, restype=ctypes.c_int32)
