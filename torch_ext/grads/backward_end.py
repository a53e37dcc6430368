"""Hooks that hold nothing, and how the end of a backward is known, however it ends."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.autograd import Variable


def weak_method(method: Callable[..., Any]) -> Callable[..., None]:
    """Calls a bound method as long as its object exists. (deepcopy copies no function; it would a WeakMethod.)"""
    known = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        if (alive := known()) is not None:
            alive(*args)

    return call


def hook(method: Callable[..., Any], *args: Any) -> Callable[..., None]:
    """A hook of a tensor or a module that calls method(*args), and ignores what it is given itself."""
    call = weak_method(method)
    return lambda *_: call(*args)


class BackwardEnd:
    """Called by autograd when a backward ends. Its graph task alone holds it: once it is dead, the backward raised."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end

    def __call__(self) -> None:
        self._on_end()


def queue_backward_end(
    method: Callable[..., Any], *args: Any, gone: Callable[..., None] | None = None
) -> "weakref.ref[BackwardEnd]":
    """At the end of the backward that is running, method(*args) is called. gone: when it is dead, as long as what this
    returns is there; must not hold the method's object."""
    end = BackwardEnd(partial(weak_method(method), *args))
    Variable._execution_engine.queue_callback(end)
    return weakref.ref(end, gone)
