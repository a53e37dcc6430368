"""Whose memory is in host memory now (see `offloading/offload.py`), and who must not be surprised by it.

Storages are empty while they are away: whoever reads one gets no error from torch, but a process that dies. So this is
asked before every use that this library knows of. As long as nothing is away, asking costs nothing.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_ext.tensors.storage import is_released

REMEDY = "call torch_ext.onload(model, optimizer) first"


class Tensors:
    """Parameters of which something is away, by identity; they are not kept alive."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._names: dict[int, tuple[weakref.ref[Tensor], str]] = {}

    def __bool__(self) -> bool:
        return bool(self._names)

    def add(self, named: Iterable[tuple[str, Tensor]]) -> Callable[[], None]:
        """From now on; returns what takes them out again."""
        keys = []
        for name, t in named:
            keys.append(id(t))
            self._names[id(t)] = (weakref.ref(t, partial(_forget, self._names, keys[-1:])), name)
        return partial(_forget, self._names, keys)

    def refuse(self, tensors: Iterable[Tensor], doing: str) -> None:
        """RuntimeError, with a name, where one of the tensors is here."""
        if not self._names:
            return
        for t in tensors:
            known = self._names.get(id(t))
            if known is not None and known[0]() is t:
                raise RuntimeError(f"{doing}: {self._what} {known[1]!r} is in host memory since offload(); {REMEDY}")


def _forget(names: dict[int, Any], keys: Sequence[int], _reference: object = None) -> None:
    for key in keys:
        names.pop(key, None)


params = Tensors("parameter")
grads = Tensors("the gradient of parameter")
optimizers: "weakref.WeakSet[torch.optim.Optimizer]" = weakref.WeakSet()
"""Those whose states are away."""


def refuse_states(optimizer: torch.optim.Optimizer, doing: str) -> None:
    """RuntimeError where the optimizer's states are away."""
    if optimizers and optimizer in optimizers:
        raise RuntimeError(f"{doing}: the states of this optimizer are in host memory since offload(); {REMEDY}")


def refuse_optimizer(optimizer: torch.optim.Optimizer, everyone: Sequence[Tensor]) -> None:
    """RuntimeError where states or weights of the optimizer, or parameters whose states it makes, are away."""
    doing = "an optimizer steps, clips, saves or loads"
    refuse_states(optimizer, doing)
    params.refuse(everyone, doing)


def refuse_gradients(parameters: Sequence[Tensor], doing: str) -> None:
    """RuntimeError where gradients of these can be neither taken nor read."""
    params.refuse(parameters, doing)
    grads.refuse(parameters, doing)


def refuse_released(t: Tensor, what: str) -> None:
    """RuntimeError where the tensor's memory is away."""
    if is_released(t):
        raise RuntimeError(f"{what} is in host memory since offload(); {REMEDY}")


def before_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """A hook of every optimizer's step, from the first offload on (torch's global one)."""
    if optimizers or params or grads:
        everyone = [p for group in optimizer.param_groups for p in group["params"]]
        refuse_states(optimizer, "step()")
        refuse_gradients(everyone, "step()")
