"""Base class of the two reducers, of buckets and of FSDP2's units: its hooks, positions of parameters and its cycle.

Hooks refer to their reducer weakly: parameters and modules must not keep it alive.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from torch_ext.parallel.cycle import Cycle, Exchange
from torch_ext.params import reducer_registry


def tensors_with_graph(outputs: Any) -> Iterator[torch.Tensor]:
    """Returns the tensors among a forward's outputs that have a grad_fn: a backward can pass through them."""
    return (t for t in tree_leaves(outputs) if isinstance(t, torch.Tensor) and t.grad_fn is not None)


class ReducerBase(reducer_registry.GradientReducer):
    """Reduces the gradients of `params`. `i` is a parameter's position in that list."""

    exchange: Exchange

    def __init__(self, params: Sequence[torch.nn.Parameter], names: Sequence[str]) -> None:
        self.params, self.names = list(params), list(names)
        self._position = {id(p): i for i, p in enumerate(self.params)}
        self._hooks: list[Any] = []
        reducer_registry.register(self, self.params)

    def detach(self) -> None:
        """Removes this reducer's hooks from parameters and modules, and its entries in the registry."""
        for handle in self._hooks:
            handle.remove()
        reducer_registry.unregister(self)

    @property
    def cycle(self) -> Cycle:
        return self.exchange.cycle

    @property
    def failed(self) -> bool:
        return self.cycle.failure is not None

    @property
    def wire_bytes(self) -> int:
        """See ParallelModule.wire_bytes."""
        return self.exchange.sent.count

    def step_called(self) -> None:
        self.exchange.sent.end()

    def step_begins(self) -> None:
        self.cycle.stepping()

    def step_written(self) -> None:
        self.cycle.stepped()

    def gradients_released(self) -> None:
        self.cycle.zero(range(len(self.params)))

    def _positions(self, params: Iterable[torch.Tensor]) -> list[int]:
        """Returns the positions of those parameters that this reducer has."""
        return [i for p in params if (i := self._position.get(id(p))) is not None]
