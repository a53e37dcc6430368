"""Checkpoints in one file: a save that is cut short at any moment leaves the former file as it was."""

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
import stat
import zipfile
from collections.abc import Iterator
from typing import Any

import torch

from torch_ext.checkpoint import at_rest_file
from torch_ext.checkpoint.archive import damaged_record, foreign_class, summary
from torch_ext.checkpoint.new_file import STALE, NewFile, refuse_full, sync_folder

_UNFINISHED = ".unfinished"


FORMS = ("logical", "at_rest")


def save(obj: Any, path: str | os.PathLike[str], *, states: str = "logical", compress: bool = True) -> None:
    """torch.save of `obj`, and `path` is at every moment either the file that was there before or all of the new one.

    Written beside it (`.NAME.*.unfinished`), synced, and renamed. What a process that was killed left there is removed
    by the next save to the same path. As with torch.save a symbolic link stays one, to the file that is
    replaced; that file's mode, owner (where this process may give it away) and extended attributes stay; into a device
    or a FIFO is written as it is. Other hard links keep the former file. One process saves to a path: under strategies
    optim and optim_grads, rank 0 what consolidate_state_dict(to=0) returned.

    states: how tensors are written.
        "logical": as torch.optim has them; torch.load reads the file.
        "at_rest": every bit as it is stored: moments in their codes and scales, an fp32 master as the 16 bits that its
            bf16 weight in `obj` lacks. `torch_ext.load` reads it, and returns the same as of a logical one.
    compress: entropy-codes what is at rest, without loss: bf16 weights take 1.32 bytes, say. A logical file is
        never compressed.

    OSError, with what was needed and what is free, where the disk is full; as open() where there is no such folder, or
    the path is a folder or may not be written to.
    """
    refuse_form(states)
    path = os.path.realpath(os.fsdecode(path))
    former = _former(path)
    if states == "at_rest":
        obj = at_rest_file.pack(obj, compress)
    if former is not None and not stat.S_ISREG(former.st_mode):
        with open(path, "wb") as there:
            torch.save(obj, there)
        return
    folder, name = os.path.split(path)
    file = _begin(folder, _stem(folder, name), former)
    try:
        with file:
            file.put(obj)
            if former is not None:
                _copy_attributes(path, former, file.fileno())
            file.sync()
            os.replace(file.path, path)
    except BaseException as error:
        refuse_full(error, path, f"{file.size} bytes beside the former file", folder)
        raise
    sync_folder(folder)


def refuse_form(states: str) -> None:
    if states not in FORMS:
        raise ValueError(f"states is {states!r}; {' and '.join(map(repr, FORMS))} are legal")


def _former(path: str) -> os.stat_result | None:
    try:
        former = os.stat(path)
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(former.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
    return former


def _copy_attributes(path: str, former: os.stat_result, descriptor: int) -> None:
    """Those of the former file that torch.save would not have changed."""
    mine = os.fstat(descriptor)
    if (former.st_uid, former.st_gid) != (mine.st_uid, mine.st_gid):
        with contextlib.suppress(OSError):
            os.fchown(descriptor, former.st_uid, former.st_gid)
    os.fchmod(descriptor, stat.S_IMODE(former.st_mode))
    with contextlib.suppress(OSError):  # there are file systems without them
        for name in os.listxattr(path):
            with contextlib.suppress(OSError):
                os.setxattr(descriptor, name, os.getxattr(path, name))


def _stem(folder: str, name: str) -> str:
    """How the names of a path's unfinished files begin. A long name is hashed, so that theirs are not too long."""
    rest = len(f"..{secrets.token_hex(8)}{_UNFINISHED}")
    if len(os.fsencode(name)) + rest > os.pathconf(folder, "PC_NAME_MAX"):
        name = hashlib.sha256(os.fsencode(name)).hexdigest()[:32]
    return f".{name}."


def _begin(folder: str, stem: str, former: os.stat_result | None) -> NewFile:
    """A new unfinished file, locked. Those of saves that have ended are removed."""
    while True:
        unfinished = os.path.join(folder, f"{stem}{secrets.token_hex(8)}{_UNFINISHED}")
        file = NewFile(unfinished, 0o666 if former is None else 0o600)  # the former's mode is set at the end
        with contextlib.suppress(OSError):  # there are file systems without locks
            fcntl.flock(file.fileno(), fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:  # else another save removed it before it was locked
            break
        file.close()
    try:
        _remove_abandoned(folder, stem, unfinished)
    except BaseException:
        os.unlink(unfinished)
        file.close()
        raise
    return file


def _remove_abandoned(folder: str, stem: str, mine: str) -> None:
    pattern = re.compile(re.escape(stem) + r"[0-9a-f]{16}" + re.escape(_UNFINISHED))
    for name in filter(pattern.fullmatch, os.listdir(folder)):
        other = os.path.join(folder, name)
        if other != mine:
            with contextlib.suppress(OSError):
                _remove_if_abandoned(other, mine)


def _remove_if_abandoned(other: str, mine: str) -> None:
    if not stat.S_ISREG(os.lstat(other).st_mode):
        return  # not made by a save of ours
    descriptor = os.open(other, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        except OSError:  # no locks here: by the file system's clock
            if os.stat(mine).st_mtime - os.fstat(descriptor).st_mtime < STALE:
                return
        os.unlink(other)
    finally:
        os.close(descriptor)


def load(path: str | os.PathLike[str], *, map_location: Any = None, mmap: bool = False, check: bool = True) -> Any:
    """torch.load of the tensors and plain values (weights_only=True) in the file `path`, which may have its states at
    rest. ValueError, naming it, and the tensor where one is damaged, where it is truncated, damaged or no checkpoint,
    and where it holds objects of other classes; RuntimeError where the file is whole and map_location, or the device
    that it was saved from, is none that its tensors can be on; FileNotFoundError where there is none.

    map_location, mmap: torch.load's. States at rest are decoded as they are read, so that they cannot be on "meta".
    check: reads the file once before, and compares its checksums, which torch writes and does not look at.
    """
    path = os.fspath(path)
    if check:
        with _says_which(path), open(path, "rb") as file:
            if (damaged := damaged_record(file)) is not None:
                raise ValueError(f"its record {damaged!r}{_tensor_in(path, damaged)} has another checksum")
    loaded = _read(path, map_location, mmap)
    if not at_rest_file.is_packed(loaded):
        return loaded
    if str(map_location) == "meta":
        raise ValueError(
            f"{path} has states at rest, which are decoded as they are read: map_location='meta' is for logical ones"
        )
    with _says_which(path):
        return at_rest_file.unpack(loaded)


def _read(path: str, map_location: Any, mmap: bool) -> Any:
    try:
        return torch.load(path, map_location=map_location, mmap=mmap, weights_only=True)
    except (OSError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # for data that is not torch.save's, torch raises any kind of error
        archive = zipfile.is_zipfile(path)
        if archive and (found := foreign_class(error)) is not None:
            raise ValueError(
                f"{path} is not made of tensors and plain values alone, and reading it may execute whatever the file "
                f"says ({found}). Where you trust who wrote it, name its classes by "
                "torch.serialization.add_safe_globals"
            ) from error
        with _says_which(path):
            torch.load(path, map_location="cpu", mmap=archive, weights_only=True)
        raise RuntimeError(
            f"{path} cannot be loaded with map_location={map_location!r}, mmap={mmap}: {summary(error)}"
        ) from error


@contextlib.contextmanager
def _says_which(path: str) -> Iterator[None]:
    """ValueError, naming the file, for whatever is raised about its content."""
    try:
        yield
    except (OSError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ValueError(
            f"{path} ({os.path.getsize(path)} bytes) is no checkpoint that can be loaded: truncated, damaged, or not "
            f"saved by torch.save ({summary(error)})"
        ) from error


def _tensor_in(path: str, damaged: str) -> str:
    """For messages: the place in the object of the tensor that a record of its archive holds, where it can be read."""
    number = damaged.rpartition("/data/")[2]
    try:
        names = at_rest_file.names_of(torch.load(path, map_location="cpu", mmap=True, weights_only=True))
        return f", of {names[int(number)]!r},"
    except Exception:  # of a damaged file, torch raises any kind of error
        return ""
