"""Tells optimizers, which clip by their policy otherwise, that gradients were clipped in place."""

import math
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor


class Clipper(Protocol):
    """An optimizer whose step clips, unless it was told that gradients are clipped."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...

    def gradients_were_clipped(self) -> None:
        """Gradients of some of its parameters were clipped; on every rank, as all ranks clip or none."""


_clippers: "weakref.WeakSet[Clipper]" = weakref.WeakSet()


def watch(clipper: Clipper) -> None:
    """From here on the optimizer is told."""
    _clippers.add(clipper)


def tell(params: Sequence[Tensor], limit: Any = None) -> None:
    """Gradients of these parameters were clipped in place. limit: to that norm; infinity only measures."""
    if not _clippers or (isinstance(limit, float) and limit == math.inf):
        return
    clipped = set(map(id, params))
    for clipper in list(_clippers):
        if any(id(p) in clipped for group in clipper.param_groups for p in group["params"]):
            clipper.gradients_were_clipped()
