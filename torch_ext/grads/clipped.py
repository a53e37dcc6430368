"""Tells optimizers that gradients were clipped in place, so that their step does not clip by the policy again."""

import math
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor


class Clipper(Protocol):
    """An optimizer whose step clips unless it was told that the gradients are clipped already."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...

    def gradients_were_clipped(self) -> None:
        """Called when gradients of some of its parameters were clipped. Happens on all ranks or on none."""


_clippers: "weakref.WeakSet[Clipper]" = weakref.WeakSet()


def register(clipper: Clipper) -> None:
    """Registers the optimizer for `notify_clipped`."""
    _clippers.add(clipper)


def notify_clipped(params: Sequence[Tensor], limit: Any = None) -> None:
    """Notifies the optimizers of these parameters that the gradients were clipped in place. limit: the norm that they
    were clipped to; infinity means that the norm was only measured, which is not reported."""
    if not _clippers or (isinstance(limit, float) and limit == math.inf):
        return
    clipped = set(map(id, params))
    for clipper in list(_clippers):
        if any(id(p) in clipped for group in clipper.param_groups for p in group["params"]):
            clipper.gradients_were_clipped()
