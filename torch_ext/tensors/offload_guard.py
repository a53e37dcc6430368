"""What is offloaded now (see `offloading/offload.py`), and the errors for who is about to use it.

A storage is empty while it is offloaded: torch lets everybody read it, and the process dies. So this is asked where the
library looks up memory for a use. As long as nothing is offloaded, asking costs next to nothing.
"""

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from torch_ext.tensors.storage import is_released

REMEDY = "call torch_ext.onload(model, optimizer) first"

# Parameters -> their names.
params, grads = WeakTensorKeyDictionary(), WeakTensorKeyDictionary()
optimizers: "weakref.WeakSet[torch.optim.Optimizer]" = weakref.WeakSet()
"""Those whose states are offloaded."""


def refuse_params(tensors: Iterable[Tensor], doing: str) -> None:
    """RuntimeError, naming one, where parameters among these are offloaded. doing: what for, begins the message."""
    _refuse(params, "parameter", tensors, doing)


def refuse_gradients(tensors: Iterable[Tensor], doing: str) -> None:
    """RuntimeError where gradients of these parameters can be neither computed nor read."""
    if params or grads:
        tensors = list(tensors)
        _refuse(params, "parameter", tensors, doing)
        _refuse(grads, "the gradient of parameter", tensors, doing)


def refuse_states(optimizer: torch.optim.Optimizer, doing: str) -> None:
    """RuntimeError where the optimizer's states are offloaded."""
    if optimizers and optimizer in optimizers:
        raise RuntimeError(f"{doing}: the states of this optimizer are offloaded; {REMEDY}")


def refuse_optimizer(optimizer: torch.optim.Optimizer, everyone: Iterable[Tensor]) -> None:
    """RuntimeError where states of the optimizer, or the parameters that it makes them of, are offloaded."""
    doing = "an optimizer steps, clips, saves or loads"
    refuse_states(optimizer, doing)
    refuse_params(everyone, doing)


def is_away(optimizer: torch.optim.Optimizer, everyone: Iterable[Tensor]) -> bool:
    """Whether `refuse_optimizer` would refuse."""
    return optimizer in optimizers or bool(params and any(p in params for p in everyone))


def present(t: Tensor, what: str) -> Tensor:
    """The tensor; RuntimeError where its memory is offloaded. what: begins the message."""
    if is_released(t):
        raise RuntimeError(f"{what} is offloaded; {REMEDY}")
    return t


def _refuse(names: WeakTensorKeyDictionary, what: str, tensors: Iterable[Tensor], doing: str) -> None:
    if names:
        for t in tensors:
            if t in names:
                raise RuntimeError(f"{doing}: {what} {names[t]!r} is offloaded; {REMEDY}")
