"""State tensors that are stored in logical form, and that torch.distributed.checkpoint saves and loads in chunks."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from torch_ext.optim.state import chunked_tensor
from torch_ext.optim.state.boxes import Box, Run, order_of
from torch_ext.optim.state.chunked_tensor import ChunkedTensor, StateHandle
from torch_ext.optim.state.sources import PlainState
from torch_ext.tensors import dense


class LargeTensor(ChunkedTensor, Tensor):
    """An ordinary tensor that is copied chunk by chunk, not as a whole, while it is saved or loaded."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Files hold plain tensors."""
        return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = copied = self.clone()
        return copied


class ConsolidatedTensor(LargeTensor):
    """A whole tensor of which other ranks have parts. It has the same chunks as these parts:
    torch.distributed.checkpoint saves a chunk that several ranks have once, and takes all of them for one tensor."""

    _cuts: Sequence[int]

    def _chunks(self) -> list[Box]:
        run = self.handle.run
        parts = [run._replace(start=begin, stop=end) for begin, end in pairwise(self._cuts)]
        return [chunk for part in parts for chunk in part.boxes(chunked_tensor.CHUNK_NUMEL)] or super()._chunks()


def large(t: Tensor, what: str) -> Tensor:
    """Returns the dense tensor t as a LargeTensor on the same memory; t itself if it fits one chunk."""
    if t.numel() <= chunked_tensor.CHUNK_NUMEL:
        return t
    made = t.as_subclass(LargeTensor)
    made.handle = _handle_of(t, what)
    return made


def consolidated(t: Tensor, cuts: Sequence[int], what: str) -> Tensor:
    """Returns the dense tensor t as a ConsolidatedTensor on the same memory. cuts: the bounds of the ranks' parts, in
    ascending order from 0 to numel."""
    made = t.as_subclass(ConsolidatedTensor)
    made.handle, made._cuts = _handle_of(t, what), cuts
    return made


def like(t: LargeTensor, copied: Tensor) -> Tensor:
    """Returns `copied`, a dense copy of t, as the subclass that t is, so that it is saved as t is."""
    made = copied.as_subclass(type(t))
    made.handle = _handle_of(copied, t.handle.what)
    if isinstance(t, ConsolidatedTensor) and isinstance(made, ConsolidatedTensor):
        made._cuts = t._cuts
    return made


def _handle_of(t: Tensor, what: str) -> StateHandle:
    run = Run(tuple(t.shape), order_of(t.shape, t.stride()), 0, t.numel())
    return StateHandle(PlainState(dense.flat(t).view(-1)), run, (0,) * t.ndim, what)
