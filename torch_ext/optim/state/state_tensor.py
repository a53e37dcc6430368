"""Tensors of a logical state that do not exist in memory: they are stored encoded, or this rank has a part only."""

from typing import Any

import torch
from torch import Tensor

from torch_ext.optim.state.boxes import Index, Run, order_of
from torch_ext.optim.state.chunked_tensor import ChunkedTensor, DecodingTensor, StateHandle, aten
from torch_ext.optim.state.sources import EncodedState, PlainState, Source, ranges


class StateTensor(ChunkedTensor, DecodingTensor):
    """A logical state tensor. It has the shape of a parameter, and is in fp32 or the dtype in which it is stored."""

    @staticmethod
    def __new__(cls, handle: StateHandle) -> "StateTensor":
        source, run = handle.source, handle.run
        made: Any = Tensor._make_wrapper_subclass(
            cls, run.shape, strides=run.strides(), dtype=source.dtype, device=source.device, requires_grad=False
        )
        made.handle = handle
        return made

    @classmethod
    def of(cls, source: Source, like: Tensor, start: int, origin: Index, what: str) -> "StateTensor":
        """Returns a tensor with the shape and memory order of `like`, which is dense. source: this rank's elements,
        which begin at `start` in memory order. origin, what: see StateHandle."""
        run = Run(tuple(like.shape), order_of(like.shape, like.stride()), start, start + source.numel)
        return cls(StateHandle(source, run, origin, what))

    def decoded(self) -> Tensor:
        return self.handle.decoded()

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Always copies encoded values: another optimizer may use the result as its state."""
        if self.handle.run.whole and isinstance(self.handle.source, EncodedState):
            return self.decoded().to(*args, **kwargs)
        return super().to(*args, **kwargs)

    def numpy(self, *, force: bool = False) -> Any:
        return self.decoded().numpy(force=force)

    def __array__(self, dtype: Any = None) -> Any:
        return self.decoded().__array__(dtype)

    def tolist(self) -> Any:
        return self.decoded().tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        run = self.handle.run
        return (
            f"StateTensor({self.handle.what}, shape={tuple(run.shape)}, dtype={self.dtype}, "
            f"elements=[{run.start}, {run.stop}))"
        )


def _same(t: StateTensor) -> StateTensor:
    return StateTensor(t.handle)


def _view(t: StateTensor, size: Any) -> Any:
    return _same(t) if tuple(size) == tuple(t.shape) else NotImplemented


def _to_copy(t: StateTensor, *, dtype: Any = None, device: Any = None, memory_format: Any = None, **rest: Any) -> Any:
    """Handles clone() and to(): copies a whole tensor to a plain one, a rank's part to another StateTensor."""
    if memory_format not in (None, torch.preserve_format):
        return NotImplemented
    if t.handle.run.whole:
        whole = t.decoded()
        return whole.to(dtype=dtype or whole.dtype, device=device or whole.device)
    return _copy_(_empty(t, dtype, device), t)


def _empty(t: StateTensor, dtype: Any, device: Any) -> StateTensor:
    handle = t.handle
    flat = torch.empty(handle.run.numel, dtype=dtype or t.dtype, device=device or t.device)
    return StateTensor(handle._replace(source=PlainState(flat)))


def _empty_like(t: StateTensor, *, dtype: Any = None, device: Any = None, **rest: Any) -> Any:
    return NotImplemented if t.handle.run.whole else _empty(t, dtype, device)


def _zeros_like(t: StateTensor, *, dtype: Any = None, device: Any = None, **rest: Any) -> Any:
    if t.handle.run.whole:
        return NotImplemented
    made: Any = _empty(t, dtype, device)
    made.handle.source.flat.zero_()
    return made


def _new_empty(t: StateTensor, size: Any, *, dtype: Any = None, device: Any = None, **rest: Any) -> Any:
    """Returns a StateTensor where the size is the same: the staging of asynchronous saves sets `handle` on it."""
    if tuple(size) != tuple(t.shape):
        return torch.empty(size, dtype=dtype or t.dtype, device=device or t.device)
    return _empty(t, dtype, device)


def _copy_(target: Any, values: Tensor, non_blocking: bool = False) -> Any:
    if not isinstance(target, StateTensor):
        return target.copy_(values.decoded()) if isinstance(values, StateTensor) else NotImplemented
    source, run = target.handle.source, target.handle.run
    if isinstance(values, StateTensor):
        if values.handle.run == run:
            for begin, part in ranges(values.handle.source):
                source.write(begin, part.to(source.device))
            return target
        values = values.decoded()
    if values.shape != target.shape:
        values = values.expand(target.shape)
    source.write(0, values.detach().permute(run.order).reshape(-1)[run.start : run.stop])
    return target


StateTensor.handlers = {
    aten.detach.default: _same,
    aten.alias.default: _same,
    aten.view.default: _view,
    aten.clone.default: _to_copy,
    aten._to_copy.default: _to_copy,
    aten.empty_like.default: _empty_like,
    aten.zeros_like.default: _zeros_like,
    aten.new_empty.default: _new_empty,
    aten.copy_.default: _copy_,
}
