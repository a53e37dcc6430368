"""State tensors that are in memory as they are, which torch.distributed.checkpoint saves and loads in chunks, too."""

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
    """A tensor like any other, which is not copied as a whole while it is saved or loaded."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Files hold plain tensors."""
        return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = copied = self.clone()
        return copied


class ConsolidatedTensor(LargeTensor):
    """A whole tensor of which other ranks have parts. Its chunks are theirs: torch.distributed.checkpoint saves a chunk
    of several ranks once, and takes it for their parts together."""

    _cuts: Sequence[int]

    def _chunks(self) -> list[Box]:
        run = self.handle.run
        parts = [run._replace(start=begin, stop=end) for begin, end in pairwise(self._cuts)]
        return [chunk for part in parts for chunk in part.boxes(chunked_tensor.CHUNK_NUMEL)] or super()._chunks()


def large(t: Tensor, what: str) -> Tensor:
    """A dense tensor, with the memory of t; t itself where that is one chunk."""
    if t.numel() <= chunked_tensor.CHUNK_NUMEL:
        return t
    made = t.as_subclass(LargeTensor)
    made.handle = _handle_of(t, what)
    return made


def consolidated(t: Tensor, cuts: Sequence[int], what: str) -> Tensor:
    """A dense tensor, with the memory of t. cuts: in ascending order from 0 to numel, where parts of ranks begin and
    end."""
    made = t.as_subclass(ConsolidatedTensor)
    made.handle, made._cuts = _handle_of(t, what), cuts
    return made


def like(t: LargeTensor, copied: Tensor) -> Tensor:
    """A dense tensor of the same elements as t, which is saved as t is."""
    made = copied.as_subclass(type(t))
    made.handle = _handle_of(copied, t.handle.what)
    if isinstance(t, ConsolidatedTensor) and isinstance(made, ConsolidatedTensor):
        made._cuts = t._cuts
    return made


def _handle_of(t: Tensor, what: str) -> StateHandle:
    run = Run(tuple(t.shape), order_of(t.shape, t.stride()), 0, t.numel())
    return StateHandle(PlainState(dense.flat(t).view(-1)), run, (0,) * t.ndim, what)
