"""The items of a checkpoint's data files: whether they are what was saved."""

import io
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import torch

from torch_ext.checkpoint.archive import damaged_record, foreign_class, summary
from torch_ext.checkpoint.folder_metadata import CHECKSUM

_END = b"torch_ext saved this as "  # the last bytes of a file: this and its name, which has the rank and the save
_READ = 1 << 22  # bytes at a time


class FileSlice(io.RawIOBase):
    """Some bytes of a file, as a file. Several of one stream may be read in turns."""

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
    """ValueError unless it has all bytes of these items and ends as that save's file of its name.

    items: of each where it ends in the file, and its key.
    """
    items = sorted(items)
    if not file.is_file():
        raise ValueError(f"{file} is missing: it has {items[0][1]!r} and {len(items) - 1} more of this checkpoint")
    ours = save_id is not None and save_id in file.name
    end = end_of(file.name) if ours else b""  # torch's files have none
    wanted, size = items[-1][0] + len(end), file.stat().st_size
    if size < wanted:
        cut = next((key for stop, key in items if stop > size), items[-1][1])
        raise ValueError(f"{file} is truncated: it has {size} bytes of {wanted}, and of {cut!r} not all of them")
    if not ours:
        return
    with open(file, "rb") as stream:
        stream.seek(items[-1][0])
        found = stream.read(len(end) + 1)
    if found != end:
        raise ValueError(
            f"{file} is of another save or rank than .metadata, or its last bytes are damaged: .metadata says where in "
            f"it {items[0][1]!r} and {len(items) - 1} more are. A checkpoint mixed from several cannot be loaded"
        )


def refuse_item(stream: IO[bytes], file: Path, key: str, info: Any) -> None:
    """ValueError unless it is what was saved: by its checksum or, where it has none, as far as torch.save wrote
    checksums of its records."""
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
        return  # compressed, say
    try:
        damaged = damaged_record(io.BufferedReader(FileSlice(stream, info.offset, info.length)))
    except Exception as error:  # for data that is no archive, zipfile raises any kind of error
        raise ValueError(f"{file} is damaged: {key!r} cannot be read ({error})") from error
    if damaged is not None:
        raise ValueError(f"{file} is damaged: of {key!r} the record {damaged!r} has another checksum")


def without_code(raw: bytes, file: Path, key: str) -> bytes:
    """What torch.save wrote, read as tensors and plain values alone and saved again: torch's planner loads it without
    weights_only, which would execute what is in it. ValueError where it holds something else."""
    try:
        value = torch.load(io.BytesIO(raw), weights_only=True)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # for data that is not torch.save's, torch raises any kind of error
        raise ValueError(
            f"{file}: {key!r} is not made of tensors and plain values alone, and reading it may execute whatever the "
            f"file says ({foreign_class(error) or summary(error)}). Where you trust who wrote it, pass "
            "CheckpointReader(path, weights_only=False), or name its classes by torch.serialization.add_safe_globals"
        ) from error
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()
