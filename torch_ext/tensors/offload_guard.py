"""Records what is offloaded (see `offloading/offload.py`), and raises errors when it is about to be used.

An offloaded tensor has an empty storage. torch does not check that when the tensor is read, and the process crashes. So
torch_ext checks here before it uses memory. The checks cost almost nothing while nothing is offloaded.
"""

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from torch_ext.tensors.storage import is_released

REMEDY = "call torch_ext.onload(model, optimizer) first"

_used = False
"""Whether anything was ever offloaded in this process. To ask a weak dictionary whether it is empty takes ten times as
long, and a step would do so five times."""

# Parameters whose weight (or gradient) is offloaded -> their names.
params, grads = WeakTensorKeyDictionary(), WeakTensorKeyDictionary()
optimizers: "weakref.WeakSet[torch.optim.Optimizer]" = weakref.WeakSet()
"""Optimizers whose states are offloaded."""


def begin() -> None:
    """Called before the first entry of `params`, `grads` or `optimizers`."""
    global _used
    _used = True


def refuse_params(tensors: Iterable[Tensor], doing: str) -> None:
    """Raises RuntimeError, naming one, if parameters among these are offloaded. doing: the intended use, which begins
    the message."""
    _refuse(params, "parameter", tensors, doing)


def refuse_gradients(tensors: Iterable[Tensor], doing: str) -> None:
    """Raises RuntimeError if one of these parameters, or its gradient, is offloaded."""
    if _used and (params or grads):
        tensors = list(tensors)
        _refuse(params, "parameter", tensors, doing)
        _refuse(grads, "the gradient of parameter", tensors, doing)


def refuse_states(optimizer: torch.optim.Optimizer, doing: str) -> None:
    """Raises RuntimeError if the optimizer's states are offloaded."""
    if _used and optimizer in optimizers:
        raise RuntimeError(f"{doing}: the states of this optimizer are offloaded; {REMEDY}")


def refuse_optimizer(optimizer: torch.optim.Optimizer, all_params: Iterable[Tensor]) -> None:
    """Raises RuntimeError if states of the optimizer are offloaded, or parameters from which it creates states."""
    doing = "an optimizer steps, clips, saves or loads"
    refuse_states(optimizer, doing)
    refuse_params(all_params, doing)


def is_offloaded(optimizer: torch.optim.Optimizer, all_params: Iterable[Tensor]) -> bool:
    """Whether `refuse_optimizer` would raise."""
    return optimizer in optimizers or bool(params and any(p in params for p in all_params))


def check_present(t: Tensor, what: str) -> Tensor:
    """Returns the tensor; raises RuntimeError if its memory is offloaded. what: begins the message."""
    if is_released(t):
        raise RuntimeError(f"{what} is offloaded; {REMEDY}")
    return t


def _refuse(names: WeakTensorKeyDictionary, what: str, tensors: Iterable[Tensor], doing: str) -> None:
    if _used and names:
        for t in tensors:
            if t in names:
                raise RuntimeError(f"{doing}: {what} {names[t]!r} is offloaded; {REMEDY}")
