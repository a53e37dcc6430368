"""What the reducers of buckets and of FSDP2's units have in common: hooks, and what is remembered of failures.

Hooks hold their reducer weakly: parameters and modules must not keep it alive.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from torch_ext.parallel.cycle import Cycle, Exchange
from torch_ext.params import reducer_registry


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


def tensors_with_graph(outputs: Any) -> Iterator[torch.Tensor]:
    """The tensors of a forward's outputs through which a backward can come."""
    return (t for t in tree_leaves(outputs) if isinstance(t, torch.Tensor) and t.grad_fn is not None)


class BackwardEnd:
    """Called by autograd when a backward ends. Its graph task alone holds it: once it is dead, the backward raised."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end

    def __call__(self) -> None:
        self._on_end()


def queue_backward_end(method: Callable[..., Any], *args: Any) -> "weakref.ref[BackwardEnd]":
    """At the end of the backward that is running, method(*args) is called."""
    end = BackwardEnd(partial(weak_method(method), *args))
    Variable._execution_engine.queue_callback(end)
    return weakref.ref(end)


class ReducerBase(reducer_registry.GradientReducer):
    """Parameters are known by their positions i in `params`."""

    exchange: Exchange

    def __init__(self, params: Sequence[torch.nn.Parameter], names: Sequence[str]) -> None:
        self.params, self.names = list(params), list(names)
        self._position = {id(p): i for i, p in enumerate(self.params)}
        self._hooks: list[Any] = [
            p.register_post_accumulate_grad_hook(hook(self.grad_ready, i)) for i, p in enumerate(self.params)
        ]
        reducer_registry.register(self, self.params)

    def detach(self) -> None:
        """The parameters and modules forget this reducer."""
        for handle in self._hooks:
            handle.remove()
        reducer_registry.unregister(self)

    def grad_ready(self, i: int) -> None:
        """Autograd has accumulated into `.grad` of parameter i."""
        raise NotImplementedError

    @property
    def cycle(self) -> Cycle:
        return self.exchange.cycle

    @property
    def failed(self) -> bool:
        return self.cycle.failure is not None

    @property
    def wire_bytes(self) -> int:
        """Sent in the last cycle that ended, and for the weights gathered since."""
        return self.exchange.wire_bytes

    def _positions(self, params: Iterable[torch.Tensor]) -> list[int]:
        """Of those that this reducer reduces."""
        return [i for p in params if (i := self._position.get(id(p))) is not None]
