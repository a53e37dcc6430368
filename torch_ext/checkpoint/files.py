"""`save` and `load` of checkpoints in one file. An interrupted save leaves the previous file unchanged."""

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
    """Saves `obj` as torch.save does, but atomically: `path` is always either the previous file or the complete new
    one.

    The data is written to `.NAME.*.unfinished` in the same folder, synced and renamed to `path`. If the process is
    killed, the next save to the same path removes the unfinished file. As with torch.save, a symbolic link stays one
    and its target is replaced. The new file keeps the target's mode, owner (if this process may set it) and extended
    attributes. A device or a FIFO is written directly. Other hard links keep the previous file. Only one process may
    save to a path: under strategies optim and optim_grads rank 0 saves the result of consolidate_state_dict(to=0).

    states: how tensors are written.
        "logical": as in torch.optim's state dicts; torch.load can read the file.
        "at_rest": as they are stored, without loss: moments as their codes and scales, an fp32 master weight as the 16
            bits that its bf16 weight in `obj` lacks. `torch_ext.load` reads the file, with the same result.
    compress: entropy-codes "at_rest" data without loss; trained bf16 weights take about 1.32 bytes each. A logical file
        is never compressed.

    Raises OSError, with the needed and free bytes, if the disk is full, and the errors of open() if the folder does not
    exist, or `path` is a folder or not writable.
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
    file = _begin(folder, _unfinished_prefix(folder, name), former)
    try:
        with file:
            file.put(obj)
            if former is not None:
                _copy_attributes(path, former, file.fileno())
            file.sync()
            os.replace(file.path, path)
    except BaseException as error:
        refuse_full(error, path, f"{file.size} bytes in addition to the previous file", folder)
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
    """Copies mode, owner and extended attributes of the previous file, which torch.save would have left unchanged."""
    mine = os.fstat(descriptor)
    if (former.st_uid, former.st_gid) != (mine.st_uid, mine.st_gid):
        with contextlib.suppress(OSError):
            os.fchown(descriptor, former.st_uid, former.st_gid)
    os.fchmod(descriptor, stat.S_IMODE(former.st_mode))
    with contextlib.suppress(OSError):  # some file systems have no extended attributes
        for name in os.listxattr(path):
            with contextlib.suppress(OSError):
                os.setxattr(descriptor, name, os.getxattr(path, name))


def _unfinished_prefix(folder: str, name: str) -> str:
    """Returns the prefix of the unfinished files' names. A long `name` is hashed to stay within the length limit."""
    rest = len(f"..{secrets.token_hex(8)}{_UNFINISHED}")
    if len(os.fsencode(name)) + rest > os.pathconf(folder, "PC_NAME_MAX"):
        name = hashlib.sha256(os.fsencode(name)).hexdigest()[:32]
    return f".{name}."


def _begin(folder: str, stem: str, former: os.stat_result | None) -> NewFile:
    """Creates and locks a new unfinished file, and removes the unfinished files of saves that have ended."""
    while True:
        unfinished = os.path.join(folder, f"{stem}{secrets.token_hex(8)}{_UNFINISHED}")
        file = NewFile(unfinished, 0o666 if former is None else 0o600)  # the previous file's mode is set at the end
        with contextlib.suppress(OSError):  # some file systems have no locks
            fcntl.flock(file.fileno(), fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:  # else another save removed it before it was locked: try again
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
        return  # no save of torch_ext creates such a file
    descriptor = os.open(other, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        except OSError:  # the file system has no locks: compare ages by its clock
            if os.stat(mine).st_mtime - os.fstat(descriptor).st_mtime < STALE:
                return
        os.unlink(other)
    finally:
        os.close(descriptor)


def load(path: str | os.PathLike[str], *, map_location: Any = None, mmap: bool = False, check: bool = True) -> Any:
    """Loads the file `path`, saved by torch.save or by `save` with either value of `states`. Only tensors and plain
    values are loaded (weights_only=True).

    map_location, mmap: as in torch.load. "at_rest" states are decoded while they are read, so they cannot be on "meta".
    check: first reads the whole file to compare its checksums, which torch writes but does not compare.

    Raises ValueError, with the file's name and that of a damaged tensor, if the file is truncated, damaged, no
    checkpoint, or holds objects of other classes. Raises RuntimeError if the file is intact, but its tensors cannot be
    on the device that map_location names or that they were saved from. Raises FileNotFoundError if there is no file.
    """
    path = os.fspath(path)
    if check:
        with _naming_file(path), open(path, "rb") as file:
            if (damaged := damaged_record(file)) is not None:
                raise ValueError(f"its record {damaged!r}{_tensor_in(path, damaged)} has another checksum")
    loaded = _read(path, map_location, mmap)
    if not at_rest_file.is_packed(loaded):
        return loaded
    if str(map_location) == "meta":
        raise ValueError(
            f"{path} has states at rest (compressed), which are decoded while they are read: map_location='meta' is "
            "legal for files with logical states"
        )
    with _naming_file(path):
        return at_rest_file.unpack(loaded)


def _read(path: str, map_location: Any, mmap: bool) -> Any:
    try:
        return torch.load(path, map_location=map_location, mmap=mmap, weights_only=True)
    except (OSError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # torch may raise any error for data that torch.save did not write
        archive = zipfile.is_zipfile(path)
        if archive and (found := foreign_class(error)) is not None:
            raise ValueError(
                f"{path} is not made of tensors and plain values alone, and reading it may execute code that is in "
                f"the file ({found}). If you trust who wrote it, name its classes by "
                "torch.serialization.add_safe_globals"
            ) from error
        with _naming_file(path):
            torch.load(path, map_location="cpu", mmap=archive, weights_only=True)
        raise RuntimeError(
            f"{path} cannot be loaded with map_location={map_location!r}, mmap={mmap}: {summary(error)}"
        ) from error


@contextlib.contextmanager
def _naming_file(path: str) -> Iterator[None]:
    """Converts errors about the file's content, raised inside, to a ValueError with the file's name."""
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
    """Returns text for a message: the place, in the saved object, of the tensor in this archive record. "" if that
    cannot be read."""
    number = damaged.rpartition("/data/")[2]
    try:
        names = at_rest_file.names_of(torch.load(path, map_location="cpu", mmap=True, weights_only=True))
        return f", of {names[int(number)]!r},"
    except Exception:  # torch may raise any error for a damaged file
        return ""
