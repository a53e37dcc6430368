"""`.metadata` of a folder of torch.distributed.checkpoint: a pickle, which is read without executing it, and behind it
a line with its checksum, which other readers ignore.

Note: reading without executing. Each class that the pickle names becomes a stand-in that only keeps what it is called
with and its state; any other name is refused. What torch means by a stand-in is made from that, once all fields have
the right types. So whatever a file says, nothing is called and no attribute of a class is set.
"""

import functools
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

from torch_ext.checkpoint.archive import summary

_MARK = b"\ntorch_ext checked this: save "
_LINE = re.compile(re.escape(_MARK) + rb"(?P<id>[0-9a-zA-Z-]{1,64}), crc32 (?P<crc>[0-9a-f]{8})\n")
_LONGEST = 128  # of such lines
CHECKSUM = "crc32"  # the attribute of torch's _StorageInfo that holds an item's


def dump(metadata: Metadata, save_id: str) -> bytes:
    marked = pickle.dumps(metadata) + _MARK + save_id.encode() + b", crc32 "
    return marked + b"%08x\n" % zlib.crc32(marked)


def save_id_of(raw: bytes) -> str | None:
    """Of which save it is; None where it has no checksum. ValueError where its checksum is another one."""
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
    except Exception as error:  # for data that is no pickle, any kind of error is raised
        raise ValueError(
            f"is no metadata of a checkpoint that can be read: truncated, damaged, or not saved by torch.distributed."
            f"checkpoint ({summary(error)})"
        ) from error
    rest = len(raw) - stream.tell()
    checked = any(hasattr(info, CHECKSUM) for info in (found.storage_data or {}).values())
    if save_id is None and (rest or checked):
        raise ValueError("is truncated or damaged: it does not end in its checksum")
    return found


_EXECUTES = (
    "holds a {}, and reading one may execute whatever the file says: weights_only=False does, where you trust who "
    "wrote it"
)


class _Refused(ValueError):
    """A ValueError whose message is complete."""


class _StandIn:
    """An object of a pickle: what its class was called with, and its state."""

    args: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *args: Any) -> None:  # pickles of dataclasses do not call it
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Each has stand-in classes of its own, so that no file can change those of another."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self._classes = {
            name: type(name[1], (_StandIn,), {"make": staticmethod(make)}) for name, make in _MAKERS.items()
        }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._classes:
            return self._classes[module, name]
        if module == "torch" and isinstance(found := vars(torch).get(name), torch.dtype):
            return found
        raise _Refused(_EXECUTES.format(f"{module}.{name}"))

    def persistent_load(self, pid: Any) -> Any:
        raise _Refused("refers to objects outside of it, which no checkpoint's metadata does")


def _made(found: Any) -> Any:
    """What torch means by it: copies of containers, in which stand-ins are replaced."""
    if isinstance(found, _StandIn):
        return type(found).make(found)  # type: ignore[attr-defined]
    if isinstance(found, dict):
        return {_made(key): _made(value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return type(found)(map(_made, found))
    return found


def _refuse_other(what: str, value: Any, kind: Any) -> None:
    """TypeError unless it is an instance of `kind`; [kind]: a list of such; {kind: kind}: a dict of such."""
    container: Any = type(kind) if isinstance(kind, list | dict) else kind
    if not isinstance(value, container):
        raise TypeError(f"{what} is {type(value).__name__}")
    if isinstance(kind, list):
        for item in value:
            _refuse_other(what, item, kind[0])
    elif isinstance(kind, dict):
        ((of_keys, of_values),) = kind.items()
        for key, item in value.items():
            _refuse_other(what, key, of_keys)
            _refuse_other(what, item, of_values)


# torch's dataclasses, and the kinds of their fields. A field that is missing is None, and legal where None is.
_FIELDS: dict[Any, dict[str, Any]] = {
    Metadata: {
        "state_dict_metadata": {str: TensorStorageMetadata | BytesStorageMetadata},
        "planner_data": object,
        "storage_data": {MetadataIndex: _StorageInfo},
        "storage_meta": StorageMeta | None,
        "version": str | None,  # which older torch does not have
    },
    MetadataIndex: {"fqn": str, "offset": torch.Size | None, "index": int | None},
    StorageMeta: {"checkpoint_id": str | None, "save_id": str | None, "modules": [str]},
    TensorStorageMetadata: {"properties": TensorProperties, "size": torch.Size, "chunks": [ChunkStorageMetadata]},
    BytesStorageMetadata: {},
    ChunkStorageMetadata: {"offsets": torch.Size, "sizes": torch.Size},
    _StorageInfo: {"relative_path": str, "offset": int, "length": int, "transform_descriptors": list | tuple | None},
}


def _dataclass(cls: Any, given: _StandIn) -> Any:
    state = {"modules": [], **(given.state or {})}  # which older torch did not save
    fields = {name: _made(state.get(name)) for name in _FIELDS[cls]}
    for name, kind in _FIELDS[cls].items():
        _refuse_other(f"{cls.__name__}.{name}", fields[name], kind)
    return cls(**{name: value for name, value in fields.items() if name in cls.__dataclass_fields__})


def _storage_info(given: _StandIn) -> _StorageInfo:
    info: _StorageInfo = _dataclass(_StorageInfo, given)
    path = info.relative_path
    if pathlib.PurePath(path).name != path or path in ("", ".", "..") or info.offset < 0 or info.length < 0:
        raise ValueError(f"{path!r}, {info.length} bytes from {info.offset} on, is no part of a file in the folder")
    if CHECKSUM in given.state:
        _refuse_other(CHECKSUM, given.state[CHECKSUM], int)
        setattr(info, CHECKSUM, given.state[CHECKSUM])
    return info


def _size(given: _StandIn) -> torch.Size:
    (sizes,) = given.args
    return torch.Size(sizes)


def _properties(given: _StandIn) -> TensorProperties:
    """torch 2.15 put the strides behind what it had saved before; what a later one puts there means nothing to this."""
    dtype, _, requires_grad, _, pinned, *later = given.state  # layout and memory format have no meaning any more
    _refuse_other("TensorProperties.dtype", dtype, torch.dtype)
    found = TensorProperties(dtype, requires_grad=bool(requires_grad), pin_memory=bool(pinned))
    if later and hasattr(found, "strides"):
        _refuse_other("TensorProperties.strides", later[0], tuple | None)
        found.strides = later[0]
    return found


def _member(given: _StandIn) -> None:
    """`getattr(enum, "NAME")`, as Python 3.11.0 to 3.11.3 pickles a member of an enum: the memory format's."""
    if len(given.args) != 2 or getattr(given.args[0], "make", None) is not _MAKERS[_MEMORY_FORMAT]:
        raise _Refused(_EXECUTES.format("builtins.getattr"))


def _posix_path(given: _StandIn) -> str:
    return str(pathlib.PurePath(*given.args))


_MEMORY_FORMAT = (TensorProperties.__module__, "_MEM_FORMAT_ENCODING")
_MAKERS: dict[tuple[str, str], Callable[[Any], Any]] = {
    **{(cls.__module__, cls.__name__): functools.partial(_dataclass, cls) for cls in _FIELDS},
    (_StorageInfo.__module__, "_StorageInfo"): _storage_info,
    (TensorProperties.__module__, "TensorProperties"): _properties,
    _MEMORY_FORMAT: lambda given: None,
    ("builtins", "getattr"): _member,
    ("torch", "Size"): _size,
    ("torch.serialization", "_get_layout"): lambda given: None,
    ("pathlib", "PosixPath"): _posix_path,
    ("pathlib", "WindowsPath"): lambda given: "/".join(given.args),
    ("pathlib._local", "PosixPath"): _posix_path,  # Python 3.13
}
