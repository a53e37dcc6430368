"""`.metadata` of a folder of torch.distributed.checkpoint: a pickle, which is read without executing it, and behind it
a line with its checksum, at which no other reader looks.

Classes in the pickle become stand-ins that only keep what they are given; what torch means by them is made from that
where it has the right form. So whatever a file says, nothing is called and no class is touched.
"""

import io
import pathlib
import pickle
import re
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

_MARK = b"\ntorch_ext checked this: save "
_LINE = re.compile(re.escape(_MARK) + rb"(?P<id>[0-9a-zA-Z-]{1,64}), crc32 (?P<crc>[0-9a-f]{8})\n")
_LONGEST = 128  # of such lines
CHECKSUM = "crc32"  # the attribute of torch's _StorageInfo that holds an item's


def dump(metadata: Metadata, save_id: str) -> bytes:
    marked = pickle.dumps(metadata) + _MARK + save_id.encode() + b", crc32 "
    return marked + b"%08x\n" % zlib.crc32(marked)


def save_id_of(raw: bytes) -> str | None:
    """Of which save it is, where it has a checksum; None where it has none. ValueError where that is another one."""
    at = raw.rfind(_MARK, max(len(raw) - _LONGEST, 0))
    if at < 0:
        return None
    line = _LINE.fullmatch(raw, at)
    if line is None or zlib.crc32(raw[: line.start("crc")]) != int(line["crc"], 16):
        raise ValueError("is damaged: it has another checksum than when it was saved")
    return line["id"].decode()


def parse(raw: bytes, *, weights_only: bool = True) -> Metadata:
    """ValueError, to be put behind the file's name, for one that is damaged or holds objects of other classes.

    weights_only=False reads it as torch does: whatever it says is executed.
    """
    save_id = save_id_of(raw)
    stream = io.BytesIO(raw)
    try:
        found = pickle.load(stream) if not weights_only else _made(_Unpickler(stream).load())
    except (MemoryError, _Refused):
        raise
    except Exception as error:  # what a pickle does that is none is of any kind
        said = str(error).strip().splitlines()
        raise ValueError(
            f"is no metadata of a checkpoint that can be read: truncated, damaged, or not saved by torch.distributed."
            f"checkpoint ({said[0] if said else type(error).__name__})"
        ) from error
    rest = len(raw) - stream.tell()
    checked = any(hasattr(info, CHECKSUM) for info in (found.storage_data or {}).values())
    if save_id is None and (rest or checked):
        raise ValueError("is truncated or damaged: it does not end in its checksum")
    return found


class _Refused(ValueError):
    """Says all there is to say."""


class _Given:
    """An object of a pickle: what its class was called with, and its state."""

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.state: Any = {}

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Every one has classes of its own: what a file does to them it does to nobody else's."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self._classes = {name: type(name[1], (_Given,), {"makes": staticmethod(make)}) for name, make in _MAKES.items()}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._classes:
            return self._classes[module, name]
        if module == "torch" and isinstance(found := vars(torch).get(name), torch.dtype):
            return found
        raise _Refused(
            f"holds a {module}.{name}, and reading one may execute whatever the file says: weights_only=False does, "
            "where you trust who wrote it"
        )

    def persistent_load(self, pid: Any) -> Any:
        raise _Refused("refers to objects outside of it, which no checkpoint's metadata does")


def _made(found: Any) -> Any:
    """What torch means by it: containers and what is in them anew, with stand-ins replaced."""
    if isinstance(found, _Given):
        return type(found).makes(found)  # type: ignore[attr-defined]
    if isinstance(found, dict):
        return {_made(key): _made(value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return type(found)(map(_made, found))
    return found


def _field(given: _Given, name: str, kind: Any, *default: Any) -> Any:
    value = _made(given.state[name] if not default else given.state.get(name, *default))
    if not isinstance(value, kind):
        raise TypeError(f"{type(given).__name__}.{name} is {type(value).__name__}")
    return value


def _size(given: _Given) -> torch.Size:
    (sizes,) = given.args
    return torch.Size(sizes)


def _properties(given: _Given) -> TensorProperties:
    dtype, _, requires_grad, _, pinned = given.state  # the layout and the format of memory mean nothing any more
    return TensorProperties(_is(dtype, torch.dtype), requires_grad=bool(requires_grad), pin_memory=bool(pinned))


def _is(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{kind.__name__} wanted, not {type(value).__name__}")
    return value


def _tensor(given: _Given) -> TensorStorageMetadata:
    chunks = _field(given, "chunks", list)
    return TensorStorageMetadata(
        _field(given, "properties", TensorProperties),
        _field(given, "size", torch.Size),
        [_is(chunk, ChunkStorageMetadata) for chunk in chunks],
    )


def _index(given: _Given) -> MetadataIndex:
    offset = _field(given, "offset", (torch.Size, type(None)), None)
    return MetadataIndex(_field(given, "fqn", str), offset, _field(given, "index", (int, type(None)), None))


def _info(given: _Given) -> _StorageInfo:
    path, offset, length = _field(given, "relative_path", str), *(_field(given, n, int) for n in ("offset", "length"))
    if pathlib.PurePath(path).name != path or path in ("", ".", "..") or offset < 0 or length < 0:
        raise ValueError(f"{path!r}, {length} bytes from {offset} on, is no part of a file in the folder")
    transforms = _field(given, "transform_descriptors", (list, tuple, type(None)), None)
    info = _StorageInfo(path, offset, length, transforms)
    if CHECKSUM in given.state:
        setattr(info, CHECKSUM, _field(given, CHECKSUM, int))
    return info


def _storage_meta(given: _Given) -> StorageMeta:
    modules = [_is(name, str) for name in _field(given, "modules", list, [])]
    place = _field(given, "checkpoint_id", (str, type(None)), None)
    return StorageMeta(place, _field(given, "save_id", (str, type(None)), None), None, modules)


def _metadata(given: _Given) -> Metadata:
    entries = _field(given, "state_dict_metadata", dict)
    stored = _field(given, "storage_data", dict)
    for key, entry in entries.items():
        _is(key, str)
        if not isinstance(entry, TensorStorageMetadata):
            _is(entry, BytesStorageMetadata)
    for index, info in stored.items():
        _is(index, MetadataIndex)
        _is(info, _StorageInfo)
    meta = _field(given, "storage_meta", (StorageMeta, type(None)), None)
    version = _field(given, "version", (str, type(None)), None)
    found = Metadata(entries, _made(given.state.get("planner_data")), stored, meta)
    if version is not None:
        found.version = version
    return found


_TORCH = "torch.distributed.checkpoint."
_MAKES: dict[tuple[str, str], Callable[[Any], Any]] = {
    (_TORCH + "metadata", "Metadata"): _metadata,
    (_TORCH + "metadata", "MetadataIndex"): _index,
    (_TORCH + "metadata", "StorageMeta"): _storage_meta,
    (_TORCH + "metadata", "TensorStorageMetadata"): _tensor,
    (_TORCH + "metadata", "BytesStorageMetadata"): lambda given: BytesStorageMetadata(),
    (_TORCH + "metadata", "ChunkStorageMetadata"): lambda given: ChunkStorageMetadata(
        _field(given, "offsets", torch.Size), _field(given, "sizes", torch.Size)
    ),
    (_TORCH + "metadata", "TensorProperties"): _properties,
    (_TORCH + "metadata", "_MEM_FORMAT_ENCODING"): lambda given: None,
    (_TORCH + "filesystem", "_StorageInfo"): _info,
    ("torch", "Size"): _size,
    ("torch.serialization", "_get_layout"): lambda given: None,
    ("pathlib", "PosixPath"): lambda given: str(pathlib.PurePath(*given.args)),
    ("pathlib", "WindowsPath"): lambda given: "/".join(given.args),
    ("pathlib._local", "PosixPath"): lambda given: str(pathlib.PurePath(*given.args)),  # Python 3.13
}
