"""Reads the tensors in the items of a checkpoint folder: those of torch.save, and records ("at_rest" states)."""

import io
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from torch_ext.checkpoint import record, record_header
from torch_ext.optim.state import at_rest

_KEPT = 2  # cached weights: items with masters of the same weight follow each other
_HEAD = 1 << 12  # bytes to read when looking for a record's header


class _Part(NamedTuple):
    """The overlap of an item's tensor with a place (a region of a tensor of the checkpoint)."""

    index: Any
    offsets: tuple[int, ...]  # where the overlap begins in the tensor of the checkpoint
    sizes: tuple[int, ...]
    begin: tuple[int, ...]  # where the item begins in the tensor of the checkpoint


class ItemTensors:
    """Reads the tensors of a folder's items. `stream_of`: for an item's index, returns its file and a stream of its
    bytes alone."""

    def __init__(self, metadata: Any, stream_of: Callable[[Any], tuple[Path, IO[bytes]]]) -> None:
        self._metadata, self._stream_of = metadata, stream_of
        self._weights: OrderedDict[Any, Tensor] = OrderedDict()

    def weights_of(self, index: Any) -> list[Any]:
        """Returns the items with the bf16 weight that is needed to decode this item; empty for all but masters. Raises
        ValueError if one of them is missing, or this item's header is damaged."""
        file, stream = self._stream_of(index)
        try:
            found = header_of(stream)
            return [] if found is None or found.place is None else [part.index for part in self._parts(found.place)]
        except ValueError as error:
            raise ValueError(f"{file}: {index.fqn!r} cannot be read ({error})") from error

    def read(self, index: Any) -> Tensor:
        """Returns the item's tensor, on the host. Raises ValueError, with file and key, if it cannot be read."""
        return self._read(index, self._weight_at)

    def assign_blocks(self, index: Any, target: Tensor) -> bool:
        """Copies the item's codes and scales directly into `target` if they are stored in the same way. Returns whether
        it did; if not, use `read`."""
        file, stream = self._stream_of(index)
        try:
            found = header_of(stream)
            if found is None or found.form != "scaled" or found.shape != tuple(target.shape):
                return False
            if not hasattr(target, "handle") or found.strides != target.handle.run.strides():
                return False
            return at_rest.assign_blocks(target, record.scaled(found, _all_of(stream)))
        except ValueError as error:
            raise ValueError(f"{file}: {index.fqn!r} cannot be read ({error})") from error

    def _read(self, index: Any, weight_at: record.WeightAt) -> Tensor:
        file, stream = self._stream_of(index)
        try:
            found = header_of(stream)
            if found is None:
                return torch.load(stream, map_location="cpu", weights_only=True)
            return record.unpack(found, _all_of(stream), weight_at)
        except (OSError, MemoryError):
            raise
        except Exception as error:  # torch may raise any error for data that is no tensor
            raise ValueError(f"{file}: {index.fqn!r} cannot be read ({error})") from error

    def _weight_at(self, place: record_header.Place) -> Tensor:
        """Returns the bf16 weight at this place, which may be spread over several items."""
        made = None
        for part in self._parts(place):
            values = self._weight(part.index)
            for dim, (offset, size, begin) in enumerate(zip(part.offsets, part.sizes, part.begin, strict=True)):
                values = values.narrow(dim, offset - begin, size)
            if part.sizes == place.sizes:
                return values
            made = torch.empty(place.sizes, dtype=values.dtype, device="cpu") if made is None else made
            into = made
            for dim, (offset, size, begin) in enumerate(zip(part.offsets, part.sizes, place.offsets, strict=True)):
                into = into.narrow(dim, offset - begin, size)
            into.copy_(values)
        assert made is not None
        return made

    def _weight(self, index: Any) -> Tensor:
        if index not in self._weights:
            while len(self._weights) >= _KEPT:
                self._weights.popitem(last=False)
            self._weights[index] = self._read(index, _no_weight)
        self._weights.move_to_end(index)
        return self._weights[index]

    def _parts(self, place: record_header.Place) -> list[_Part]:
        """Returns the items' parts that make up this place. Raises ValueError if the checkpoint lacks some of it."""
        described = self._metadata.state_dict_metadata.get(place.key)
        parts = list(_overlaps(place, getattr(described, "chunks", ())))
        if sum(torch.Size(part.sizes).numel() for part in parts) != torch.Size(place.sizes).numel():
            raise ValueError(f"it is stored relative to weight {place.key!r}, which is not in the checkpoint")
        return parts


def _overlaps(place: record_header.Place, chunks: Any) -> Iterator[_Part]:
    for chunk in chunks:
        if len(chunk.offsets) != len(place.offsets):
            continue
        offsets = tuple(map(max, place.offsets, chunk.offsets))
        ends = [
            min(a + n, b + m) for a, n, b, m in zip(place.offsets, place.sizes, chunk.offsets, chunk.sizes, strict=True)
        ]
        sizes = tuple(end - offset for end, offset in zip(ends, offsets, strict=True))
        if all(size > 0 for size in sizes):
            yield _Part(MetadataIndex(place.key, chunk.offsets), offsets, sizes, tuple(chunk.offsets))


def _no_weight(place: record_header.Place) -> Tensor:
    raise ValueError(f"it is a weight, but its header says that it is stored relative to another one, {place.key!r}")


def _all_of(stream: IO[bytes]) -> Tensor:
    """Returns all bytes of the stream. On a plain file this is a single read."""
    raw = bytearray(stream.seek(0, io.SEEK_END))
    stream.seek(0)
    at = 0
    while at < len(raw) and (more := stream.readinto(memoryview(raw)[at:])):  # type: ignore[attr-defined]
        at += more
    return torch.frombuffer(raw, dtype=torch.uint8)


def header_of(stream: IO[bytes]) -> record_header.Record | None:
    """Returns the header of the item's record; None if the item was written by torch.save. A stream without a record is
    left at its beginning."""
    stream.seek(0)
    raw = stream.read(_HEAD)
    if not record_header.is_record(raw):
        stream.seek(0)
        return None
    missing = record_header.head_bytes(raw) - len(raw)
    return record_header.parse(raw + stream.read(missing) if missing > 0 else raw)
