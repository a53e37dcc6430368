"""Tensors that torch.distributed.checkpoint saves and loads in chunks (ChunkStorageMetadata), one at a time.

Note: decoded chunks. A state tensor that is encoded, or whose elements are on several ranks, has no memory that
torch.distributed.checkpoint could read. For such tensors it asks for a list of chunks (`__create_chunk_list__`), makes
a write or read item of each, and asks for the tensor of an item only when it is processed (`__get_tensor_shard__`).
That tensor is a ChunkTensor: it is decoded when it is pickled, and encoded when it is copied to. So only one chunk's
values are in memory at a time.
"""

import gc
from collections.abc import Callable
from itertools import product
from math import prod
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from torch_ext.optim.state.boxes import Box, Index, Run
from torch_ext.optim.state.sources import Source, ranges
from torch_ext.tensors import dense

CHUNK_NUMEL = 1 << 18
"""The largest number of elements in a chunk."""

aten = torch.ops.aten


class StateHandle(NamedTuple):
    """Describes the elements of a state tensor that this rank has, and how to read and write them."""

    source: Source
    run: Run
    """Which elements of the tensor they are."""
    origin: Index
    """The index of the tensor's first element in the checkpoint's tensor; not zero for the local part of a DTensor."""
    what: str
    """Names the tensor in messages."""

    def decoded(self) -> Tensor:
        """Returns the whole tensor in new memory. RuntimeError where this rank has a part only."""
        run, source = self.run, self.source
        if not run.whole:
            raise RuntimeError(
                f"{self.what} is sharded over the ranks: this one has elements [{run.start}, {run.stop}) of the "
                f"{prod(run.shape)}. torch.distributed.checkpoint saves and loads it as it is; for whole tensors "
                "(torch.save, full_state_dict=True) call consolidate_state_dict(to=0) on every rank"
            )
        whole = torch.empty_strided(run.shape, run.strides(), dtype=source.dtype, device=source.device)
        flat = whole.as_strided((run.numel,), (1,))
        for begin, values in ranges(source):
            flat[begin : begin + values.numel()] = values
        return whole


class DecodingTensor(Tensor):
    """A wrapper subclass without memory of its own. An operator that has no handler gets the decoded values; if it
    writes to them, they are written back to the state."""

    handle: StateHandle
    handlers: ClassVar[dict[Any, Callable[..., Any]]]
    """By operator. A handler may return NotImplemented; then the operator gets the decoded values."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        dense.send_by_value(cls)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        handler = cls.handlers.get(func)
        found = handler(*args, **(kwargs or {})) if handler is not None else NotImplemented
        return _on_decoded(func, args, kwargs or {}) if found is NotImplemented else found

    def decoded(self) -> Tensor:
        """Returns the values in new memory."""
        raise NotImplementedError

    def storage(self) -> Any:
        """Raises: a library that reads memory itself, as safetensors does, would find none."""
        raise RuntimeError(
            "this tensor of an optimizer's state has no memory of its own, since its values are decoded where they are "
            "used; for libraries that read memory themselves, safetensors for instance, pass tensor.clone()"
        )

    share_memory_ = storage

    def __dlpack__(self, **options: Any) -> Any:
        """Exports a decoded copy, as numpy() does."""
        return self.decoded().__dlpack__(**options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Files hold plain tensors."""
        return self.decoded().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = copied = self.clone()
        return copied


def _on_decoded(func: Any, args: Any, kwargs: Any) -> Any:
    """Calls an operator on decoded values; copies back what it has written to them."""
    decoded: dict[int, tuple[Any, Tensor]] = {}

    def value_of(t: Any) -> Tensor:
        if id(t) not in decoded:
            decoded[id(t)] = t, t.decoded()
        return decoded[id(t)][1]

    args, kwargs = tree_map_only(DecodingTensor, value_of, (args, kwargs))
    result = func(*args, **kwargs)
    if func._schema.is_mutable:
        for t, value in decoded.values():
            t.copy_(value)
            result = t if result is value else result
    return result


class ChunkTensor(DecodingTensor):
    """One chunk of a state tensor, decoded when it is read and encoded when it is written."""

    _chunk: Box

    @staticmethod
    def __new__(cls, handle: StateHandle, chunk: Box) -> "ChunkTensor":
        source = handle.source
        made: Any = Tensor._make_wrapper_subclass(
            cls, chunk.sizes, dtype=source.dtype, device=source.device, requires_grad=False
        )
        made.handle, made._chunk = handle, chunk
        return made

    def decoded(self) -> Tensor:
        """Returns the chunk's values in new contiguous memory."""
        values = self.handle.source.read(*self.stored_range())
        copied = dense.unpooled(self._chunk.sizes, self.dtype, self.device)
        if copied.numel():
            copied.copy_(values.as_strided(self._chunk.sizes, self.handle.run.strides(), values.storage_offset()))
        return copied

    def stored_range(self) -> tuple[int, int]:
        """Returns the range of the source's elements from the chunk's first to its last. If the chunk is not contiguous
        there, the range has other elements, too."""
        run, chunk = self.handle.run, self._chunk
        strides = run.strides()
        if prod(chunk.sizes) == 0:
            return 0, 0
        first = sum(o * s for o, s in zip(chunk.offsets, strides, strict=True)) - run.start
        return first, first + 1 + sum((n - 1) * s for n, s in zip(chunk.sizes, strides, strict=True))

    def assign(self, values: Tensor) -> None:
        """Writes values of the chunk's shape to the state."""
        (source, run, _, what), chunk = self.handle, self._chunk
        if values.shape != self.shape:
            raise ValueError(f"{what}: values of shape {tuple(values.shape)} for {tuple(self.shape)}")
        if not values.numel():
            return
        (first, last), order = self.stored_range(), run.order
        if last - first == values.numel():
            source.write(first, values.permute(order).reshape(-1))
            return
        # Write contiguous rows. A row spans the innermost dimension of which the chunk has a part only, and all inside
        # of it; there is one row for each index of the dimensions outside.
        inner = len(order) - 1
        while chunk.sizes[order[inner]] == run.shape[order[inner]]:
            inner -= 1
        outside = [chunk.sizes[dim] for dim in order[:inner]]
        strides = run.strides()
        rows = values.permute(order).reshape(*outside, -1)
        for index in product(*map(range, outside)):
            at = first + sum(i * strides[dim] for i, dim in zip(index, order[:inner], strict=True))
            source.write(at, rows[index].contiguous())

    def data_ptr(self) -> int:
        raise RuntimeError(f"a chunk of {self.handle.what} is not in memory: clone() it")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ChunkTensor({self.handle.what}, {self._chunk})"


def _same(t: ChunkTensor) -> ChunkTensor:
    return ChunkTensor(t.handle, t._chunk)


def _slice(t: ChunkTensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    if step != 1:
        return NotImplemented
    first, last, _ = slice(start, end).indices(t.shape[dim])
    offsets, sizes = list(t._chunk.offsets), list(t._chunk.sizes)
    offsets[dim] += first
    sizes[dim] = max(last - first, 0)
    return ChunkTensor(t.handle, Box(tuple(offsets), tuple(sizes)))


def _copy_(target: Any, values: Tensor, non_blocking: bool = False) -> Any:
    if not isinstance(target, ChunkTensor):
        return NotImplemented
    target.assign((values.decoded() if isinstance(values, DecodingTensor) else values).detach())
    return target


ChunkTensor.handlers = {
    aten.detach.default: _same,
    aten.alias.default: _same,
    aten.slice.Tensor: _slice,
    aten.copy_.default: _copy_,
}


class ChunkedTensor:
    """The methods by which torch.distributed.checkpoint saves and loads a tensor in chunks."""

    handle: StateHandle

    def _chunks(self) -> list[Box]:
        """Returns the chunks of this rank's elements."""
        return self.handle.run.boxes(CHUNK_NUMEL)

    def _saved_offsets(self, chunk: Box) -> Index:
        """Returns the index of the chunk's first element in the checkpoint's tensor."""
        return tuple(a + b for a, b in zip(self.handle.origin, chunk.offsets, strict=True))

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(offsets=torch.Size(self._saved_offsets(chunk)), sizes=torch.Size(chunk.sizes))
            for chunk in self._chunks()
        ]

    def __create_write_items__(self, fqn: str, object: Tensor) -> list[Any]:
        """object: this tensor, or the DTensor whose local part it is."""
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties(dtype=self.handle.source.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=object.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        # Each torch.save leaves a reference cycle that keeps what it wrote alive: here, a chunk's decoded values.
        gc.collect(1)
        for chunk in self._chunks():
            if index.offset is None or self._saved_offsets(chunk) == tuple(index.offset):
                return ChunkTensor(self.handle, chunk)
        raise ValueError(f"{index.fqn}: this rank has no part of {self.handle.what} that begins at {index.offset}")
