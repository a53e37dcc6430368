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
    """From `enter` to `leave` the parameter is `other`."""

    def __init__(self, param: Tensor, other: Tensor) -> None:
        self._param, self._weight, self._other = param, param.data, other
        self._behind: Tensor | None = None
        self._written: Tensor | None = None

    def enter(self) -> None:
        if _is_held(self._param):
            self._behind = self._other.detach().requires_grad_(self._param.requires_grad)
            torch._C._swap_tensor_impl(self._param, self._behind)
        else:
            self._param.data = self._other

    def leave(self) -> Tensor:
        """The parameter is what it was; returns what it was meanwhile. Once more, after an interrupt: the same."""
        if self._written is None:
            self._written = self._other if self._is_itself() else self._param.data
        if self._is_itself():
            return self._written
        if self._behind is not None:
            torch._C._swap_tensor_impl(self._param, self._behind)
        else:
            self._param.data = self._weight
        return self._written

    def _is_itself(self) -> bool:
        own = self._weight
        return self._param.dtype == own.dtype and self._param.data_ptr() == own.data_ptr()


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
