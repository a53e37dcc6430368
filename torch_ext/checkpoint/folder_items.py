"""The items of a checkpoint's data files: whether they are what was saved."""

import io
import re
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import torch

from torch_ext.checkpoint.folder_metadata import CHECKSUM

_END = b"torch_ext saved this as "  # and the file's name, which has the rank's and the save's: its last bytes
_PIECE = 1 << 22  # bytes that are read at a time
_ZIP = b"PK\x03\x04"  # how torch.save's files begin


class Part(io.RawIOBase):
    """Some bytes of a file, as a file. Whoever reads two of one file does so in turns."""

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
    """ValueError unless it has as many bytes as these items and ends as that save's file of its name.

    items: where each ends in it, and its key.
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
    while left and (piece := stream.read(min(left, _PIECE))):
        left, crc = left - len(piece), zlib.crc32(piece, crc)
    if left or crc != wanted:
        raise ValueError(
            f"{file} is damaged: {key!r}, its bytes {info.offset} to {info.offset + info.length}, has another checksum "
            "than when it was saved"
        )


def _refuse_records(stream: IO[bytes], file: Path, key: str, info: Any) -> None:
    if getattr(info, "transform_descriptors", None):
        return  # compressed, say
    view = Part(stream, info.offset, info.length)
    if view.read(len(_ZIP)) != _ZIP:
        return  # an older format, or a planner's own
    view.seek(0)
    try:
        with zipfile.ZipFile(view) as archive:
            damaged = archive.testzip()
    except Exception as error:  # what zipfile raises of data that is none of its own is of any kind
        raise ValueError(f"{file} is damaged: {key!r} cannot be read ({error})") from error
    if damaged is not None:
        raise ValueError(f"{file} is damaged: of {key!r} the record {damaged!r} has another checksum")


def plain(raw: bytes, file: Path, key: str) -> bytes:
    """What torch.save makes of the plain values that it made these bytes of: such as may be read by executing them.
    ValueError where there are others."""
    try:
        value = torch.load(io.BytesIO(raw), weights_only=True)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # what torch raises of data that is none of its own is of any kind
        named = re.search(r"GLOBAL (\S+)", str(error))
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"{file}: {key!r} is not made of tensors and plain values alone, and reading it may execute whatever the "
            f"file says ({named[1] if named else said}). Where you trust who wrote it, pass "
            "CheckpointReader(path, weights_only=False), or name its classes by torch.serialization.add_safe_globals"
        ) from error
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()
