"""Runs operators without torch's dispatcher, where no other dispatch key would do anything.

A call through torch.ops makes a handle of every tensor of every list. That takes 0.3 us per tensor, half of a step of
many small tensors. Here C reads the tensors from the Python objects at every call, by DLPack's table of functions, and
runs the same function. Anything that intercepts operators (modes, transforms, tracing, the profiler, tensor subclasses)
still sees them: such calls go through torch's dispatcher. So do calls whose arguments C rejects; the dispatcher's
operator then raises the error.
"""

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from torch_ext.native import library

_PLAIN = (Tensor, torch.nn.Parameter)
"""The tensor classes that override no operators; C compares types with exactly these."""

_included = torch._C._dispatch_tls_local_include_set
_PLAIN_KEYS = _included().raw_repr()
"""The dispatch keys that a plain thread includes. Transforms, functionalization, tracing and modes include more."""


def _none_intercepts() -> bool:
    """Whether no mode, transform, tracer or profiler is active on this thread."""
    return (
        _included().raw_repr() == _PLAIN_KEYS
        and torch._C._len_torch_function_stack() == 0
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._autograd._profiler_enabled()
    )


@functools.cache
def caller() -> Callable[..., int] | None:
    """Returns tx_torch_call; None if this torch has no DLPack table, or this process lacks a symbol that C needs."""
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
    return library.function("tx_torch_call", *of, restype=ctypes.c_int32, keep_gil=True)


Order: TypeAlias = "ctypes.Array[ctypes.c_int32]"
"""Memory in which an operator notes the order of its tensors' addresses for the next call (tx_adamw_args.order)."""


def order_for(params: int) -> Order:
    return (ctypes.c_int32 * (16 * params))()


def run(row: int, name: str, arguments: Sequence[Any], order: "Order | None" = None) -> bool:
    """Runs the operator and returns True; returns False if it has to be called through torch's dispatcher.

    row: its row in C's table. arguments: a tuple. order: from `order_for`, the same in repeated calls for the same
    tensors. Raises the operator's RuntimeError.
    """
    call = caller()
    if call is None or not _none_intercepts():
        return False
    taken, error = ctypes.c_int32(), library.Error()
    nbytes = 0 if order is None else ctypes.sizeof(order)
    if call(row, arguments, order, nbytes, ctypes.byref(taken), ctypes.byref(error)):
        raise RuntimeError(f"torch_ext::{name}: {error.text}")
    return bool(taken.value)
