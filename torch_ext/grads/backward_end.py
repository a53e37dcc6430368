"""Hooks that do not keep their objects alive, and a notification at the end of a backward, even of one that raises."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.autograd import Variable


def weak_method(method: Callable[..., Any]) -> Callable[..., None]:
    """Returns a function that calls a bound method, and does nothing once the method's object is gone. It is a function
    because deepcopy leaves functions alone; it would copy a WeakMethod."""
    known = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        if (alive := known()) is not None:
            alive(*args)

    return call


def hook(method: Callable[..., Any], *args: Any) -> Callable[..., None]:
    """Returns a hook for a tensor or a module that calls method(*args) and ignores the hook's own arguments."""
    call = weak_method(method)
    return lambda *_: call(*args)


class BackwardEnd:
    """Callback that autograd calls when a backward ends. Only the backward's graph task references it, so if it is
    freed without having been called, the backward raised."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end

    def __call__(self) -> None:
        self._on_end()


def queue_backward_end(
    method: Callable[..., Any], *args: Any, on_freed: Callable[..., None] | None = None
) -> "weakref.ref[BackwardEnd]":
    """Makes autograd call method(*args) at the end of the running backward. on_freed: called when the callback is
    freed, as long as the returned weak reference exists; must not reference the method's object."""
    end = BackwardEnd(partial(weak_method(method), *args))
    Variable._execution_engine.queue_callback(end)
    return weakref.ref(end, on_freed)
