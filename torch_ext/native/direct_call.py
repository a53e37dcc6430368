"""Runs operators without torch's dispatcher, where no other dispatch key would do anything.

A call through torch.ops makes a handle of every tensor of every list. That takes 0.3 us per tensor, half of a step of
many small tensors. Here C reads the tensors from the Python objects at every call, by DLPack's table of functions, and
runs the same function. Anything that intercepts operators (modes, transforms, tracing, the profiler, tensor subclasses)
still sees them: such calls go through torch's dispatcher. So do calls whose arguments C rejects; the dispatcher's
operator then raises the error.
"""

import ctypes
import functools
import sys
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_ext.native import library, structs

_PLAIN = (Tensor, torch.nn.Parameter)
"""The tensor classes that override no operators; C compares types with exactly these."""

_included = torch._C._dispatch_tls_local_include_set
_PLAIN_KEYS = _included().raw_repr()
"""The dispatch keys that a plain thread includes. Transforms, functionalization, tracing and modes include more."""


def _none_intercepts(function_modes: int = 0) -> bool:
    """Whether no mode, transform, tracer or profiler is active on this thread but so many torch function modes."""
    return (
        _included().raw_repr() == _PLAIN_KEYS
        and torch._C._len_torch_function_stack() == function_modes
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._autograd._profiler_enabled()
    )


def _only_default_device() -> bool:
    """Whether torch.set_default_device(), or a device as a context, is all that intercepts anything on this thread: a
    mode that changes calls which make tensors, but takes 2 us for each attribute that is read as well."""
    if torch._C._len_torch_function_stack() != 1 or not _none_intercepts(function_modes=1):
        return False
    modes = sys.modules.get("torch.utils._device")  # imported with the first default device
    return modes is not None and type(torch._C._get_function_stack_at(0)) is modes.DeviceContext


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
    of = (ctypes.c_int32, ctypes.py_object, pointer, pointer, pointer)
    return library.function("tx_torch_call", *of, restype=ctypes.c_int32, keep_gil=True)


@structs.mirror("tx_torch_notes")
class _NotesStruct(library.Struct):
    """The memory and its size."""


class Notes:
    """Memory in which an operator notes what it has checked (tx_adamw_args.notes), kept from one call to the next for
    the same tensors; for one call at a time."""

    def __init__(self, params: int = 0) -> None:
        self._memory = (ctypes.c_int64 * (64 + 76 * params if params else 0))()
        self._struct = _NotesStruct(memory=ctypes.addressof(self._memory), bytes=ctypes.sizeof(self._memory))
        self.address = ctypes.addressof(self._struct)

    @property
    def noted(self) -> bool:
        """Whether the last call has noted what it has checked."""
        return bool(self._memory[0])


def run(row: int, name: str, arguments: Sequence[Any], notes: Notes | None = None) -> bool:
    """Runs the operator and returns True; returns False if it has to be called through torch's dispatcher.

    row: its row in C's table. arguments: a tuple. notes: the same in repeated calls for the same tensors. Raises the
    operator's RuntimeError.
    """
    call = caller()
    if call is None or not _none_intercepts():
        return False
    if notes is None:
        notes = Notes()
    taken, error = ctypes.c_int32(), library.Error()
    if call(row, arguments, notes.address, ctypes.byref(taken), ctypes.byref(error)):
        raise RuntimeError(f"torch_ext::{name}: {error.text}")
    return bool(taken.value)


def repeat(
    row: int, arguments: Sequence[Any], params: list[Tensor], versions: "array[int] | None", own: int, notes: Notes
) -> bool:
    """Runs an operator for parameters that are as they were at an earlier call, with their current gradients, and
    returns True; past a default device, too. Returns False where it has to be called the usual way, which also says
    what the operator rejects; nothing was written then.

    arguments: of an earlier call, whose first entry has the parameters; the second one, of the gradients, is ignored.
    params: the parameters now. versions, own: their version counters are versions + own; None: they are not compared.
    """
    call = repeater()
    if call is None:
        return False
    address = None if versions is None else versions.buffer_info()[0]
    if _none_intercepts():
        return bool(call(row, arguments, params, address, own, notes.address))
    if _only_default_device():
        with torch._C.DisableTorchFunction():
            return bool(call(row, arguments, params, address, own, notes.address))
    return False


@functools.cache
def repeater() -> Callable[..., int] | None:
    """Returns tx_torch_repeat; None where `caller` returns None."""
    if caller() is None:
        return None
    pointer, items = ctypes.c_void_p, ctypes.py_object
    of = (ctypes.c_int32, items, items, pointer, ctypes.c_int64, pointer)
    return library.function("tx_torch_repeat", *of, restype=ctypes.c_int32, keep_gil=True)


def versions(tensors: list[Tensor], own: int) -> "array[int]":
    """Returns the tensors' version counters, each reduced by `own`."""
    if caller() is None:
        return array("q", [t._version - own for t in tensors])
    found = array("q", bytes(8 * len(tensors)))
    _read_versions()(tensors, len(tensors), own, found.buffer_info()[0])
    return found


def grads(tensors: list[Tensor]) -> tuple[list[Tensor | None], int]:
    """Returns the `.grad` of each tensor, and how many of them are None."""
    if caller() is None:
        found = [t.grad for t in tensors]
        return found, sum(g is None for g in found)
    found = [None] * len(tensors)
    return found, _read_grads()(tensors, len(tensors), None, found)


@functools.cache
def _read_grads() -> Callable[[list[Tensor], int, None, list[Tensor | None]], int]:
    items = ctypes.py_object
    of = (items, ctypes.c_int64, items, items)
    return library.function("tx_torch_grads", *of, restype=ctypes.c_int64, keep_gil=True)


@functools.cache
def _read_versions() -> Callable[[list[Tensor], int, int, int], None]:
    number = ctypes.c_int64
    of = (ctypes.py_object, number, number, ctypes.c_void_p)
    return library.function("tx_torch_versions", *of, restype=None, keep_gil=True)
