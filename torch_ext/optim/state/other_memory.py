"""A parameter that is another tensor for a while.

Note: gradient accumulators. Where `.data` becomes a tensor of another dtype torch drops the node of the graph that
accumulates the parameter's gradient, and with it the hooks that were put on it: those of DistributedDataParallel and of
Megatron-LM, which then reduce no gradient of it any more, and do not notice. So where somebody holds this node the
tensors behind two Python objects are exchanged, as torch.utils.swap_tensors does, whose checks are for exchanges that
are never undone.
"""

from typing import Any

import torch
from torch import Tensor

_MARK = "torch_ext: asked whether it stays"


class OtherMemory:
    """From here to `leave` the parameter is `other`."""

    def __init__(self, param: Tensor, other: Tensor) -> None:
        self._param, self._weight = param, param.data
        self._behind: Tensor | None = None
        if _is_held(param):
            self._behind = other.detach().requires_grad_(param.requires_grad)
            torch._C._swap_tensor_impl(param, self._behind)
        else:
            param.data = other

    def leave(self) -> Tensor:
        """The parameter is what it was; returns what it was meanwhile."""
        written = self._param.data
        if self._behind is not None:
            torch._C._swap_tensor_impl(self._param, self._behind)
        else:
            self._param.data = self._weight
        return written


def _is_held(param: Tensor) -> bool:
    """Whether somebody, a graph or who has put hooks there, holds what accumulates its gradient."""
    if not param.requires_grad:
        return False
    with torch.enable_grad():
        _metadata_of(param)[_MARK] = True
        return _MARK in _metadata_of(param)


def _metadata_of(param: Tensor) -> dict[str, Any]:
    """Of the node, which is made where there is none, and goes where nobody holds it."""
    node: Any = torch.autograd.graph.get_gradient_edge(param).node
    return node.metadata
