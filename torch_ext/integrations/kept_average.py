"""Puts the averages of weights that optimizers keep into the model, temporarily or permanently."""

import contextlib
from collections.abc import Iterable, Sequence

import torch

from torch_ext.optim.ema import AveragingOptimizer
from torch_ext.params.param_groups import innermost


def averaging(optimizers: Iterable[torch.optim.Optimizer], doing: str) -> list[AveragingOptimizer]:
    """Returns the optimizers inside frameworks' wrappers. Raises ValueError if one of them keeps no average."""
    found = []
    for given in optimizers:
        optimizer = innermost(given)
        if not isinstance(optimizer, AveragingOptimizer) or optimizer.averaging.dtype is None:
            raise ValueError(
                f"{doing}: the optimizer, {type(optimizer).__module__}.{type(optimizer).__name__}, keeps no average; "
                "train with torch_ext.AdamW(..., ema_decay=0.9999), say, or leave the callback out"
            )
        found.append(optimizer)
    if not found:
        raise ValueError(f"{doing}: there is no optimizer whose average could be used")
    return found


def averaged(optimizers: Sequence[AveragingOptimizer]) -> contextlib.ExitStack:
    """Replaces the weights by their averages, until the returned stack is closed."""
    with contextlib.ExitStack() as entered:
        for optimizer in optimizers:
            entered.enter_context(optimizer.ema_weights())
        return entered.pop_all()


@torch.no_grad()
def keep(optimizers: Sequence[AveragingOptimizer]) -> None:
    """Replaces the weights by their averages permanently, as if these had been loaded."""
    params = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    with averaged(optimizers):
        averages = [p.detach().clone() for p in params]
    for p, average in zip(params, averages, strict=True):
        p.copy_(average)
