"""Reads and writes `.metadata` in a folder of torch.distributed.checkpoint: a pickle, followed by a line with its
checksum, which other readers ignore. The pickle is read without executing code in it.

Note: reading without executing. Unpickling normally calls whatever functions the file names. Here each class that a
pickle of torch may name is replaced by a stand-in, which only stores its arguments and its state. Any other name raises
an error. torch's objects are created from the stand-ins after the types of all fields have been checked. So no file can
cause a call or set an attribute of a class.
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
_LONGEST = 128  # bytes of such a line
CHECKSUM = "crc32"  # the attribute that holds an item's checksum, added to torch's _StorageInfo


def dump(metadata: Metadata, save_id: str) -> bytes:
    """Returns the content of `.metadata`: the pickle and the line with its checksum."""
    marked = pickle.dumps(metadata) + _MARK + save_id.encode() + b", crc32 "
    return marked + b"%08x\n" % zlib.crc32(marked)


def save_id_of(raw: bytes) -> str | None:
    """Returns the id of the save that wrote this `.metadata`, None if it has no checksum line. Raises ValueError if the
    checksum is wrong."""
    at = raw.rfind(_MARK, max(len(raw) - _LONGEST, 0))
    if at < 0:
        return None
    line = _LINE.fullmatch(raw, at)
    if line is None or zlib.crc32(raw[: line.start("crc")]) != int(line["crc"], 16):
        raise ValueError("is damaged: it has another checksum than when it was saved")
    return line["id"].decode()


def parse(raw: bytes, *, weights_only: bool = True) -> Metadata:
    """Returns the metadata in the bytes of `.metadata`. Raises ValueError if they are damaged or hold objects of other
    classes. The message continues a sentence that begins with the file's name.

    weights_only=False unpickles as torch does, which can execute code in the file.
    """
    save_id = save_id_of(raw)
    stream = io.BytesIO(raw)
    try:
        found = pickle.load(stream) if not weights_only else _converted(_Unpickler(stream).load())
    except (MemoryError, _Refused):
        raise
    except Exception as error:  # unpickling may raise any error for data that is no pickle
        raise ValueError(
            "is not checkpoint metadata that can be read: truncated, damaged, or not saved by "
            f"torch.distributed.checkpoint ({summary(error)})"
        ) from error
    rest = len(raw) - stream.tell()
    checked = any(hasattr(info, CHECKSUM) for info in (found.storage_data or {}).values())
    if save_id is None and (rest or checked):
        raise ValueError("is truncated or damaged: it does not end in its checksum")
    return found


_EXECUTES = (
    "holds a {}, which only weights_only=False reads. That may execute code that is in the file: pass it only if "
    "you trust who wrote it"
)


class _Refused(ValueError):
    """A ValueError whose message `parse` passes on unchanged."""


class _StandIn:
    """Stands for an object in a pickle: stores the arguments of its class and its state."""

    args: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *args: Any) -> None:  # not called for dataclasses
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Unpickles to stand-ins. Each unpickler creates its own stand-in classes: a file cannot change another's."""

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


def _converted(found: Any) -> Any:
    """Returns the object with every stand-in replaced by torch's object. Containers are copied."""
    if isinstance(found, _StandIn):
        return type(found).make(found)  # type: ignore[attr-defined]
    if isinstance(found, dict):
        return {_converted(key): _converted(value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return type(found)(map(_converted, found))
    return found


def _refuse_other(what: str, value: Any, kind: Any) -> None:
    """Raises TypeError unless the value is an instance of `kind`. [kind] means a list of instances, {kind: kind} a
    dict. what: names the value in the message."""
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


# torch's dataclasses and the types of their fields, as `_refuse_other` takes them. A missing field counts as None.
_FIELDS: dict[Any, dict[str, Any]] = {
    Metadata: {
        "state_dict_metadata": {str: TensorStorageMetadata | BytesStorageMetadata},
        "planner_data": object,
        "storage_data": {MetadataIndex: _StorageInfo},
        "storage_meta": StorageMeta | None,
        "version": str | None,  # older torch has no such field
    },
    MetadataIndex: {"fqn": str, "offset": torch.Size | None, "index": int | None},
    StorageMeta: {"checkpoint_id": str | None, "save_id": str | None, "modules": [str]},
    TensorStorageMetadata: {"properties": TensorProperties, "size": torch.Size, "chunks": [ChunkStorageMetadata]},
    BytesStorageMetadata: {},
    ChunkStorageMetadata: {"offsets": torch.Size, "sizes": torch.Size},
    _StorageInfo: {"relative_path": str, "offset": int, "length": int, "transform_descriptors": list | tuple | None},
}


def _dataclass(cls: Any, given: _StandIn) -> Any:
    state = {"modules": [], **(given.state or {})}  # older torch did not save "modules"
    fields = {name: _converted(state.get(name)) for name in _FIELDS[cls]}
    for name, kind in _FIELDS[cls].items():
        _refuse_other(f"{cls.__name__}.{name}", fields[name], kind)
    return cls(**{name: value for name, value in fields.items() if name in cls.__dataclass_fields__})


def _storage_info(given: _StandIn) -> _StorageInfo:
    info: _StorageInfo = _dataclass(_StorageInfo, given)
    path = info.relative_path
    if pathlib.PurePath(path).name != path or path in ("", ".", "..") or info.offset < 0 or info.length < 0:
        raise ValueError(f"{path!r}, {info.length} bytes from {info.offset} on, is not inside a file of the folder")
    if CHECKSUM in given.state:
        _refuse_other(CHECKSUM, given.state[CHECKSUM], int)
        setattr(info, CHECKSUM, given.state[CHECKSUM])
    return info


def _size(given: _StandIn) -> torch.Size:
    (sizes,) = given.args
    return torch.Size(sizes)


def _properties(given: _StandIn) -> TensorProperties:
    """Returns a tensor's properties. torch 2.15 appended the strides to the state; later additions are ignored."""
    dtype, _, requires_grad, _, pinned, *later = given.state  # torch no longer uses the layout and the memory format
    _refuse_other("TensorProperties.dtype", dtype, torch.dtype)
    found = TensorProperties(dtype, requires_grad=bool(requires_grad), pin_memory=bool(pinned))
    if later and hasattr(found, "strides"):
        _refuse_other("TensorProperties.strides", later[0], tuple | None)
        found.strides = later[0]
    return found


def _memory_format_getattr(given: _StandIn) -> None:
    """Accepts `getattr(enum, "NAME")` for the memory format, which torch no longer uses; raises for any other getattr.
    Python 3.11.0 to 3.11.3 pickle a member of an enum that way."""
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
    ("builtins", "getattr"): _memory_format_getattr,
    ("torch", "Size"): _size,
    ("torch.serialization", "_get_layout"): lambda given: None,
    ("pathlib", "PosixPath"): _posix_path,
    ("pathlib", "WindowsPath"): lambda given: "/".join(given.args),
    ("pathlib._local", "PosixPath"): _posix_path,  # Python 3.13
}
