"""Operators past torch's dispatcher, where nobody on the way would do anything.

A call through torch.ops makes a handle of every tensor of every list: 0.3 us each, half of a step of many small
tensors. Here C reads the tensors from Python's objects (DLPack's table of functions), each time anew, and runs the same
function. Whoever may listen to operators gets them as before: modes, transforms, tracing, the profiler,
tensors of other classes; and so does a call that C does not take, whose error torch's operator raises.
"""

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from torch_ext.native import library

_PLAIN = (Tensor, torch.nn.Parameter)
"""Whose operators nobody overrides."""

_included = torch._C._dispatch_tls_local_include_set
_QUIET = _included().raw_repr()
"""What a thread includes by itself: transforms, functionalization, tracing and modes include more."""


def _nobody_listens() -> bool:
    return (
        _included().raw_repr() == _QUIET
        and torch._C._len_torch_function_stack() == 0
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._autograd._profiler_enabled()
    )


@functools.cache
def caller() -> Callable[..., int] | None:
    """tx_torch_call, or None: this torch, or this process, shows C no tensors."""
    capsule = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return None
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.argtypes, pointer_of.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_void_p
    types = (ctypes.c_void_p * len(_PLAIN))(*map(id, _PLAIN))
    try:
        exchange = pointer_of(capsule, b"dlpack_exchange_api")
        prepare = library.function("tx_torch_objects", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
        prepare(exchange, types, len(_PLAIN))
    except (RuntimeError, ValueError):
        return None
    pointer = ctypes.c_void_p
    of = (ctypes.c_int32, ctypes.py_object, pointer, ctypes.c_int64, pointer, pointer)
    return library.function("tx_torch_call", *of, restype=ctypes.c_int32, brief=True)


Order: TypeAlias = "ctypes.Array[ctypes.c_int32]"
"""See tx_adamw_args.order."""


def order_for(params: int) -> Order:
    return (ctypes.c_int32 * (16 * params))()


def run(row: int, name: str, arguments: Sequence[Any], order: "Order | None" = None) -> bool:
    """Whether the operator, which is that row of C's table, was run; else torch's dispatcher has to be asked.

    arguments: a tuple. order: of calls of this one. RuntimeError as the operator's.
    """
    call = caller()
    if call is None or not _nobody_listens():
        return False
    taken, error = ctypes.c_int32(), library.Error()
    nbytes = 0 if order is None else ctypes.sizeof(order)
    if call(row, arguments, order, nbytes, ctypes.byref(taken), ctypes.byref(error)):
        raise RuntimeError(f"torch_ext::{name}: {error.text}")
    return bool(taken.value)
