"""What the reducers of buckets and of FSDP2's units have in common: hooks, and what is remembered of failures.

Hooks hold their reducer weakly: parameters and modules must not keep it alive.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from torch_ext.parallel.cycle import Cycle, Exchange
from torch_ext.params import reducer_registry


def tensors_with_graph(outputs: Any) -> Iterator[torch.Tensor]:
    """The tensors of a forward's outputs through which a backward can come."""
    return (t for t in tree_leaves(outputs) if isinstance(t, torch.Tensor) and t.grad_fn is not None)


class ReducerBase(reducer_registry.GradientReducer):
    """Parameters are known by their positions i in `params`."""

    exchange: Exchange

    def __init__(self, params: Sequence[torch.nn.Parameter], names: Sequence[str]) -> None:
        self.params, self.names = list(params), list(names)
        self._position = {id(p): i for i, p in enumerate(self.params)}
        self._hooks: list[Any] = []
        reducer_registry.register(self, self.params)

    def detach(self) -> None:
        """The parameters and modules forget this reducer."""
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
        """Sent in the last cycle that ended, and for the weights gathered since."""
        return self.exchange.wire_bytes

    def step_begins(self) -> None:
        self.cycle.stepping()

    def step_written(self) -> None:
        self.cycle.stepped()

    def gradients_released(self) -> None:
        self.cycle.zero(range(len(self.params)))

    def _positions(self, params: Iterable[torch.Tensor]) -> list[int]:
        """Of those that this reducer reduces."""
        return [i for p in params if (i := self._position.get(id(p))) is not None]
