"""Checks that the data files of a checkpoint folder, and the items in them, are what was saved."""

import io
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import torch

from torch_ext.checkpoint.archive import damaged_record, foreign_class, summary
from torch_ext.checkpoint.folder_metadata import CHECKSUM

_END = b"torch_ext saved this as "  # a data file ends with this and its own name, which has the rank and the save id
_READ = 1 << 22  # bytes to read at a time


class FileSlice(io.RawIOBase):
    """A byte range of a file as a stream of its own. Several slices of one stream may be read alternately."""

    def __init__(self, stream: IO[bytes], offset: int, length: int) -> None:
        self._stream, self._offset, self._length, self._at = stream, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        begin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = max(begin + offset, 0)
        return self._at

    def readinto(self, buffer: Any) -> int:
        wanted = max(min(len(buffer), self._length - self._at), 0)
        self._stream.seek(self._offset + self._at)
        found = self._stream.readinto(memoryview(buffer)[:wanted])  # type: ignore[attr-defined]
        self._at += found
        return int(found)


def end_of(name: str) -> bytes:
    return _END + name.encode()


def refuse_file(file: Path, items: Iterable[tuple[int, str]], save_id: str | None) -> None:
    """Raises ValueError unless the data file holds all bytes of these items and ends with its own name.

    items: for each item, the offset of its end in the file, and its key. save_id: the save that wrote `.metadata`. A
        file name without it is torch's; torch's files have no name at their end.
    """
    items = sorted(items)
    if not file.is_file():
        raise ValueError(f"{file} is missing: {items[0][1]!r} and {len(items) - 1} more of this checkpoint are in it")
    ours = save_id is not None and save_id in file.name
    end = end_of(file.name) if ours else b""
    wanted, size = items[-1][0] + len(end), file.stat().st_size
    if size < wanted:
        cut = next((key for stop, key in items if stop > size), items[-1][1])
        raise ValueError(f"{file} is truncated: it has {size} of {wanted} bytes, and {cut!r} is incomplete")
    if not ours:
        return
    with open(file, "rb") as stream:
        stream.seek(items[-1][0])
        found = stream.read(len(end) + 1)
    if found != end:
        raise ValueError(
            f"{file} is of another save or rank than .metadata, or its last bytes are damaged: .metadata has offsets "
            f"in it for {items[0][1]!r} and {len(items) - 1} more. A checkpoint mixed from several cannot be loaded"
        )


def refuse_item(stream: IO[bytes], file: Path, key: str, info: Any) -> None:
    """Raises ValueError unless the item is what was saved. Compares its checksum, or, if `.metadata` has none for it,
    those that torch.save wrote for the records of its archive."""
    wanted = getattr(info, CHECKSUM, None)
    if wanted is None:
        _refuse_records(stream, file, key, info)
        return
    stream.seek(info.offset)
    left, crc = info.length, 0
    while left and (piece := stream.read(min(left, _READ))):
        left, crc = left - len(piece), zlib.crc32(piece, crc)
    if left or crc != wanted:
        raise ValueError(
            f"{file} is damaged: {key!r}, its bytes {info.offset} to {info.offset + info.length}, has another checksum "
            "than when it was saved"
        )


def _refuse_records(stream: IO[bytes], file: Path, key: str, info: Any) -> None:
    if getattr(info, "transform_descriptors", None):
        return  # transformed data, compressed for example, is not an archive
    try:
        damaged = damaged_record(io.BufferedReader(FileSlice(stream, info.offset, info.length)))
    except Exception as error:  # zipfile may raise any error for data that is no archive
        raise ValueError(f"{file} is damaged: {key!r} cannot be read ({error})") from error
    if damaged is not None:
        raise ValueError(f"{file} is damaged: the record {damaged!r} of {key!r} has another checksum")


def without_code(raw: bytes, file: Path, key: str) -> bytes:
    """Returns the item's bytes in a form that is safe to load: read with weights_only=True and saved again. torch's
    planner loads items without weights_only, which could execute code in them. Raises ValueError if the item holds
    anything but tensors and plain values."""
    try:
        value = torch.load(io.BytesIO(raw), weights_only=True)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # torch may raise any error for data that torch.save did not write
        raise ValueError(
            f"{file}: {key!r} is not made of tensors and plain values alone, and reading it may execute code that is "
            f"in the file ({foreign_class(error) or summary(error)}). If you trust who wrote it, pass "
            "CheckpointReader(path, weights_only=False), or name its classes by torch.serialization.add_safe_globals"
        ) from error
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()
