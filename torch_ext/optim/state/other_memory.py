"""Makes a parameter another tensor for a while.

Note: gradient accumulators. When `.data` is set to a tensor of another dtype, torch drops the parameter's
gradient-accumulator node, and the hooks on it. DistributedDataParallel and Megatron-LM have hooks there, and would then
silently stop reducing the parameter's gradient. So if anything holds this node, the tensors behind two Python objects
are swapped instead, as torch.utils.swap_tensors does. (That function itself has checks that are meant for swaps which
are never undone.)
"""

from typing import Any

import torch
from torch import Tensor

_MARK = "torch_ext: asked whether it stays"


class OtherMemory:
    """Makes `param` the tensor `other`, from `enter` to `leave`."""

    def __init__(self, param: Tensor, other: Tensor) -> None:
        self._param, self._weight, self._other = param, param.data, other
        self._swapped_tensor: Tensor | None = None
        self._written: Tensor | None = None

    def enter(self) -> None:
        """Makes the parameter the other tensor: by `.data`, or by a swap if its accumulator node is held."""
        if _is_held(self._param):
            self._swapped_tensor = self._other.detach().requires_grad_(self._param.requires_grad)
            torch._C._swap_tensor_impl(self._param, self._swapped_tensor)
        else:
            self._param.data = self._other

    def leave(self) -> Tensor:
        """Restores the parameter; returns the tensor that it was meanwhile. May be called again after an interrupt, and
        then returns the same tensor."""
        if self._written is None:
            self._written = self._other if self._is_itself() else self._param.data
        if self._is_itself():
            return self._written
        if self._swapped_tensor is not None:
            torch._C._swap_tensor_impl(self._param, self._swapped_tensor)
        else:
            self._param.data = self._weight
        return self._written

    def _is_itself(self) -> bool:
        own = self._weight
        return self._param.dtype == own.dtype and self._param.data_ptr() == own.data_ptr()


def _is_held(param: Tensor) -> bool:
    """Whether a graph, or code that has put hooks there, holds the parameter's gradient-accumulator node."""
    if not param.requires_grad:
        return False
    with torch.enable_grad():
        _metadata_of(param)[_MARK] = True
        return _MARK in _metadata_of(param)


def _metadata_of(param: Tensor) -> dict[str, Any]:
    """Returns the metadata of the gradient-accumulator node. torch creates a new node where nothing holds one."""
    node: Any = torch.autograd.graph.get_gradient_edge(param).node
    return node.metadata
