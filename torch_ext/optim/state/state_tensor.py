"""State tensors whose elements are not there as such: decoded when they are read, and maybe one rank's part only.

torch.distributed.checkpoint saves and loads them by boxes, one at a time; any other operator sees the decoded values,
if this rank has all of them. What is written to one is written to the optimizer's state.
"""

import gc
from collections.abc import Callable, Sequence
from itertools import product
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from torch_ext.optim.state.boxes import Box, Index, Run, order_of
from torch_ext.optim.state.sources import EncodedState, PlainState, stretches
from torch_ext.tensors import dense

Source: TypeAlias = PlainState | EncodedState
BOX = 1 << 18  # elements that torch.distributed.checkpoint is given at a time
aten = torch.ops.aten


class StateHandle:
    """What a state tensor stands for."""

    def __init__(self, source: Source, run: Run, origin: Index, what: str) -> None:
        """run: the elements that source has, of the tensor; origin: where that begins in the one that checkpoints know
        (a DTensor, of which it is the local part); what: for messages."""
        self.source, self.run, self.origin, self.what = source, run, origin, what

    def with_source(self, source: Source) -> "StateHandle":
        return StateHandle(source, self.run, self.origin, self.what)

    def of(self, values: Tensor) -> Tensor:
        """This rank's elements of a whole tensor, in memory order: a view where that is theirs."""
        run = self.run
        return values.detach().permute(run.order).reshape(-1)[run.start : run.stop]

    def refuse_part(self) -> None:
        run = self.run
        if not run.whole:
            raise RuntimeError(
                f"{self.what} is cut over the ranks: this one has elements [{run.start}, {run.stop}) of the "
                f"{prod(run.shape)}. torch.distributed.checkpoint saves and loads it as it is; for whole tensors "
                "(torch.save, full_state_dict=True) call consolidate_state_dict(to=0) on every rank"
            )

    def decoded(self) -> Tensor:
        """All of it, as a plain tensor that shares nothing. RuntimeError where this rank has a part only."""
        self.refuse_part()
        run, source = self.run, self.source
        whole = torch.empty_strided(run.shape, run.strides(), dtype=source.dtype, device=source.device)
        flat = whole.as_strided((run.numel,), (1,))
        for begin, end in stretches(run.numel):
            flat[begin:end] = source.read(begin, end)
        return whole


class _ChunkedTensor:
    """What torch.distributed.checkpoint asks a tensor for that it saves and loads in boxes."""

    _held: StateHandle

    def _boxes(self) -> list[Box]:
        return self._held.run.boxes(BOX)

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(offsets=torch.Size(self._in_checkpoint(box.offsets)), sizes=torch.Size(box.sizes))
            for box in self._boxes()
        ]

    def __create_write_items__(self, fqn: str, object: Tensor) -> list[Any]:
        """object: this, or the DTensor of which it is the local part."""
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties(dtype=self._held.source.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=object.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        # Each torch.save leaves a cycle behind that holds what it wrote: here that is memory of its own for each box.
        gc.collect(1)
        for box in self._boxes():
            if index.offset is None or self._in_checkpoint(box.offsets) == tuple(index.offset):
                return ChunkTensor(self._held, box)
        raise ValueError(f"{index.fqn}: this rank has no part of {self._held.what} that begins at {index.offset}")

    def _in_checkpoint(self, offsets: Index) -> Index:
        return tuple(a + b for a, b in zip(self._held.origin, offsets, strict=True))


class StateTensor(_ChunkedTensor, Tensor):
    """A logical state tensor: of a parameter's shape, in fp32 or the dtype that it has at rest."""

    @staticmethod
    def __new__(cls, held: StateHandle) -> "StateTensor":
        source, run = held.source, held.run
        made: Any = Tensor._make_wrapper_subclass(
            cls, run.shape, strides=run.strides(), dtype=source.dtype, device=source.device, requires_grad=False
        )
        made._held = held
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        handler = _HANDLERS.get(func)
        found = handler(*args, **(kwargs or {})) if handler is not None else NotImplemented
        return _on_values(func, args, kwargs or {}) if found is NotImplemented else found

    # -- where torch looks at memory

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Files hold plain tensors."""
        return self._held.decoded().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = copied = self.clone()
        return copied

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Of encoded values always a copy: another optimizer goes on with it."""
        held = self._held
        if held.run.whole and isinstance(held.source, EncodedState):
            return held.decoded().to(*args, **kwargs)
        return super().to(*args, **kwargs)

    def numpy(self, *, force: bool = False) -> Any:
        return self._held.decoded().numpy(force=force)

    def __array__(self, dtype: Any = None) -> Any:
        return self._held.decoded().__array__(dtype)

    def tolist(self) -> Any:
        return self._held.decoded().tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        run = self._held.run
        return (
            f"StateTensor({self._held.what}, shape={tuple(run.shape)}, dtype={self.dtype}, "
            f"elements=[{run.start}, {run.stop}))"
        )


class LargeTensor(_ChunkedTensor, Tensor):
    """A tensor like any other, which torch.distributed.checkpoint does not have to hold twice."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Files hold plain tensors."""
        return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = copied = self.clone()
        return copied


class ConsolidatedTensor(LargeTensor):
    """A whole tensor of which other ranks have parts: in their boxes, so that torch.distributed.checkpoint, which saves
    a box of several ranks once, finds that it is the same as their parts together."""

    _cuts: Sequence[int]

    def _boxes(self) -> list[Box]:
        ends = zip(self._cuts[:-1], self._cuts[1:], strict=True)
        runs = [self._held.run._replace(start=begin, stop=end) for begin, end in ends]
        return [box for run in runs for box in run.boxes(BOX)] or self._held.run.boxes(BOX)


class ChunkTensor(Tensor):
    """A box of a state tensor: decoded where it is pickled or read, encoded where it is copied to."""

    _held: StateHandle
    _box: Box

    @staticmethod
    def __new__(cls, held: StateHandle, box: Box) -> "ChunkTensor":
        made: Any = Tensor._make_wrapper_subclass(
            cls, box.sizes, dtype=held.source.dtype, device=held.source.device, requires_grad=False
        )
        made._held, made._box = held, box
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        handler = _BOX_HANDLERS.get(func)
        found = handler(*args, **(kwargs or {})) if handler is not None else NotImplemented
        return _on_values(func, args, kwargs or {}) if found is NotImplemented else found

    def decoded(self) -> Tensor:
        """Contiguous, with memory of its own."""
        first, last = self._span()
        values = self._held.source.read(first, last)
        copied = dense.unpooled(self._box.sizes, self.dtype, self.device)
        if copied.numel():
            copied.copy_(values.as_strided(self._box.sizes, self._held.run.strides(), values.storage_offset()))
        return copied

    def _span(self) -> tuple[int, int]:
        """The stretch of what this rank has that goes from the first element to the last."""
        run, box = self._held.run, self._box
        strides = run.strides()
        if prod(box.sizes) == 0:
            return 0, 0
        first = sum(o * s for o, s in zip(box.offsets, strides, strict=True)) - run.start
        return first, first + 1 + sum((n - 1) * s for n, s in zip(box.sizes, strides, strict=True))

    def assign(self, values: Tensor) -> None:
        """values: of the box's shape."""
        if values.shape != self.shape:
            raise ValueError(f"{self._held.what}: values of shape {tuple(values.shape)} for {tuple(self.shape)}")
        if not values.numel():
            return
        source, run, box = self._held.source, self._held.run, self._box
        (first, last), order = self._span(), run.order
        if last - first == values.numel():
            source.write(first, values.permute(order).reshape(-1))
            return
        # Runs of memory, one for each place of the dimensions outside of the innermost that is not taken whole.
        inner = len(order) - 1
        while box.sizes[order[inner]] == run.shape[order[inner]]:
            inner -= 1
        outside = [box.sizes[dim] for dim in order[:inner]]
        strides = run.strides()
        rows = values.permute(order).reshape(*outside, -1)
        for place in product(*map(range, outside)):
            at = first + sum(i * strides[dim] for i, dim in zip(place, order[:inner], strict=True))
            source.write(at, rows[place].contiguous())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.decoded().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = copied = self.decoded()
        return copied

    def data_ptr(self) -> int:
        raise RuntimeError(f"a box of {self._held.what} is not in memory: clone() it")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ChunkTensor({self._held.what}, {self._box})"


def tensor_of(source: Source, like: Tensor, start: int, origin: Index, what: str) -> StateTensor:
    """What source has of a tensor of the shape and memory order of `like`, which is dense, from element start on."""
    run = Run(tuple(like.shape), order_of(like.shape, like.stride()), start, start + source.numel)
    return StateTensor(StateHandle(source, run, origin, what))


def in_boxes(t: Tensor, what: str) -> Tensor:
    """A dense tensor, which shares the memory of t where that is large."""
    if t.numel() <= BOX:
        return t
    made = t.as_subclass(LargeTensor)
    made._held = _all_of(t, what)
    return made


def consolidated(t: Tensor, cuts: Sequence[int], what: str) -> Tensor:
    """A dense tensor, with the memory of t. cuts: in ascending order from 0 to numel, where parts of ranks begin and
    end."""
    made = t.as_subclass(ConsolidatedTensor)
    made._held, made._cuts = _all_of(t, what), cuts
    return made


def _all_of(t: Tensor, what: str) -> StateHandle:
    run = Run(tuple(t.shape), order_of(t.shape, t.stride()), 0, t.numel())
    return StateHandle(PlainState(dense.flat(t).view(-1)), run, (0,) * t.ndim, what)


# -- operators: of state tensors, then of boxes


def _same(t: StateTensor) -> StateTensor:
    return StateTensor(t._held)


def _view(t: StateTensor, size: Any) -> Any:
    return StateTensor(t._held) if tuple(size) == tuple(t.shape) else NotImplemented


def _clone(t: StateTensor, *, memory_format: Any = None) -> Any:
    return _like(t) if memory_format in (None, torch.preserve_format) else NotImplemented


def _to_copy(t: StateTensor, *, dtype: Any = None, device: Any = None, memory_format: Any = None, **rest: Any) -> Any:
    if memory_format not in (None, torch.preserve_format):
        return NotImplemented
    return _like(t, dtype=dtype, device=device)


def _like(t: StateTensor, dtype: Any = None, device: Any = None) -> Tensor:
    """A copy: whole ones are plain."""
    held = t._held
    if held.run.whole:
        whole = held.decoded()
        return whole.to(dtype=dtype or whole.dtype, device=device or whole.device)
    made = _empty(t, dtype, device)
    _copy_(made, t)
    return made


def _empty(t: StateTensor, dtype: Any, device: Any) -> StateTensor:
    held = t._held
    flat = torch.empty(held.run.numel, dtype=dtype or t.dtype, device=device or t.device)
    return StateTensor(held.with_source(PlainState(flat)))


def _empty_like(t: StateTensor, *, dtype: Any = None, device: Any = None, **rest: Any) -> Any:
    return NotImplemented if t._held.run.whole else _empty(t, dtype, device)


def _zeros_like(t: StateTensor, *, dtype: Any = None, device: Any = None, **rest: Any) -> Any:
    if t._held.run.whole:
        return NotImplemented
    made: Any = _empty(t, dtype, device)
    made._held.source.flat.zero_()
    return made


def _new_empty(t: StateTensor, size: Any, *, dtype: Any = None, device: Any = None, **rest: Any) -> Any:
    """DCP's staging of asynchronous saves puts a copy of `_held` into it: always one of these."""
    if tuple(size) != tuple(t.shape):
        return torch.empty(size, dtype=dtype or t.dtype, device=device or t.device)
    return _empty(t, dtype, device)


def _copy_(target: Any, values: Tensor, non_blocking: bool = False) -> Any:
    if not isinstance(target, StateTensor):
        if isinstance(values, StateTensor):
            return target.copy_(values._held.decoded())
        return NotImplemented
    held = target._held
    if isinstance(values, StateTensor):
        other = values._held
        if other.run == held.run:
            for begin, end in stretches(held.run.numel):
                held.source.write(begin, other.source.read(begin, end).to(held.source.device))
            return target
        values = other.decoded()
    if values.shape != target.shape:
        values = values.expand(target.shape)
    held.source.write(0, held.of(values))
    return target


_HANDLERS: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _same,
    aten.alias.default: _same,
    aten.view.default: _view,
    aten.clone.default: _clone,
    aten._to_copy.default: _to_copy,
    aten.empty_like.default: _empty_like,
    aten.zeros_like.default: _zeros_like,
    aten.new_empty.default: _new_empty,
    aten.copy_.default: _copy_,
}


def _box_same(t: ChunkTensor) -> ChunkTensor:
    return ChunkTensor(t._held, t._box)


def _box_slice(t: ChunkTensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    if step != 1:
        return NotImplemented
    first, last, _ = slice(start, end).indices(t.shape[dim])
    offsets, sizes = list(t._box.offsets), list(t._box.sizes)
    offsets[dim] += first
    sizes[dim] = max(last - first, 0)
    return ChunkTensor(t._held, Box(tuple(offsets), tuple(sizes)))


def _box_copy_(target: Any, values: Tensor, non_blocking: bool = False) -> Any:
    if not isinstance(target, ChunkTensor):
        return NotImplemented
    target.assign(_plain(values).detach())
    return target


_BOX_HANDLERS: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _box_same,
    aten.alias.default: _box_same,
    aten.slice.Tensor: _box_slice,
    aten.copy_.default: _box_copy_,
}


def _plain(t: Any) -> Tensor:
    if isinstance(t, StateTensor):
        return t._held.decoded()
    return t.decoded() if isinstance(t, ChunkTensor) else t


def _on_values(func: Any, args: Any, kwargs: Any) -> Any:
    """The operator on decoded values; what it writes to them is written to the state."""
    decoded: dict[int, tuple[Any, Tensor]] = {}

    def value_of(t: Any) -> Tensor:
        if id(t) not in decoded:
            decoded[id(t)] = t, _plain(t)
        return decoded[id(t)][1]

    args, kwargs = tree_map_only((StateTensor, ChunkTensor), value_of, (args, kwargs))
    result = func(*args, **kwargs)
    if func._schema.is_mutable:
        for t, value in decoded.values():
            t.copy_(value)
            result = t if result is value else result
    return result
