"""Checkpoints in one file: a save that is cut short at any moment leaves the former file as it was."""

import contextlib
import fcntl
import glob
import os
import secrets
import zipfile
from typing import Any

import torch

_UNFINISHED = ".unfinished"
_ZIP = b"PK\x03\x04"  # how torch.save's files begin


def save(obj: Any, path: str | os.PathLike[str]) -> None:
    """torch.save, and `path` is at every moment either the file that was there before or all of the new one.

    Written beside it (`.NAME.*.unfinished`), brought to the disk, and renamed. What a process that was killed left
    there the next save of the same path removes. One process saves to a path: under strategies optim and optim_grads,
    rank 0 what consolidate_state_dict(to=0) returned.
    """
    path = os.path.abspath(os.fspath(path))
    folder, name = os.path.split(path)
    _remove_abandoned(folder, name)
    unfinished = os.path.join(folder, f".{name}.{secrets.token_hex(8)}{_UNFINISHED}")
    with open(unfinished, "xb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)  # not abandoned
            torch.save(obj, file)
            file.flush()
            os.fsync(file.fileno())
            os.replace(unfinished, path)
        except BaseException:
            os.unlink(unfinished)
            raise
    sync_folder(folder)


def _remove_abandoned(folder: str, name: str) -> None:
    for left in glob.glob(os.path.join(glob.escape(folder), f".{glob.escape(name)}.*{_UNFINISHED}")):
        with contextlib.suppress(OSError), open(left, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(left)


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Brings the names of its files to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load(path: str | os.PathLike[str], *, map_location: Any = None, mmap: bool = False, check: bool = True) -> Any:
    """torch.load of tensors and plain values (weights_only=True). ValueError, naming the file, where it is truncated,
    damaged or no checkpoint; FileNotFoundError where there is none.

    map_location, mmap: torch.load's. check: reads the file once before, and compares its checksums, which torch writes
    and does not look at.
    """
    path = os.fspath(path)
    try:
        if check:
            _check(path)
        return torch.load(path, map_location=map_location, mmap=mmap, weights_only=True)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # what torch raises of data that is none of its own is of any kind
        said = str(error).strip().splitlines()
        raise ValueError(
            f"{path} ({os.path.getsize(path)} bytes) is no checkpoint that can be loaded: truncated, damaged, or not "
            f"saved by torch.save ({said[0] if said else type(error).__name__})"
        ) from error


def _check(path: str) -> None:
    with open(path, "rb") as file:
        if file.read(len(_ZIP)) != _ZIP:
            return  # an older format, or none
        with zipfile.ZipFile(file) as archive:
            if (damaged := archive.testzip()) is not None:
                raise ValueError(f"its record {damaged!r} has another checksum")
