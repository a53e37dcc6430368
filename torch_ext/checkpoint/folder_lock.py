"""Who saves to a folder: a lock that names its holder, where the file system has locks."""

import contextlib
import errno
import fcntl
import os
import socket
import threading
import time
from pathlib import Path
from typing import NamedTuple

LOCK = ".lock"
_BUSY = "{} is being saved to by {}, and one save at a time is legal. {}"


class _Held(NamedTuple):
    descriptor: int
    save_id: str
    thread: threading.Thread


_held: dict[tuple[int, str], _Held] = {}  # by process, for a fork has the dict and not the lock, and folder


def acquire(folder: Path, save_id: str) -> bool:
    """Locks it until `release` or the end of the process: False where it cannot be locked. RuntimeError, naming who
    has the lock, where another save is under way.

    A thread that saves again is done with its former save, whatever became of that. The lock is fcntl's, not flock's,
    which a worker forked meanwhile would keep when this process is killed.
    """
    key, path = _key(folder), folder / LOCK
    former = _held.get(key)
    if former is not None:
        if former.thread.is_alive() and former.thread is not threading.current_thread():
            raise RuntimeError(_BUSY.format(folder, f"thread {former.thread.name!r} of this process", "Wait for it"))
        release(folder, former.save_id)
    descriptor = _locked(folder, path)
    if descriptor is None:
        return False
    since = time.strftime("%Y-%m-%d %H:%M:%S %z")
    _held[key] = _Held(descriptor, save_id, threading.current_thread())
    holder = f"process {os.getpid()} on {socket.gethostname()}, since {since} (save {save_id})\n".encode()
    with contextlib.suppress(OSError):  # a full disk: then the lock has no name
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, holder, 0)
    return True


def release(folder: Path, save_id: str) -> None:
    """Does nothing where this save has no lock."""
    key = _key(folder)
    held = _held.get(key)
    if held is not None and held.save_id == save_id:
        del _held[key]
        with contextlib.suppress(OSError):
            os.ftruncate(held.descriptor, 0)  # the next one may be asked before it wrote its name
        os.close(held.descriptor)


def has(folder: Path, save_id: str) -> bool:
    held = _held.get(_key(folder))
    return held is not None and held.save_id == save_id


def _key(folder: Path) -> tuple[int, str]:
    return os.getpid(), os.path.realpath(folder)


def _locked(folder: Path, path: Path) -> int | None:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    while True:
        try:
            descriptor = os.open(path, flags, 0o666)
        except PermissionError:  # somebody else's
            return None
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(descriptor, path):  # else somebody removed it between the two
                return descriptor
        except OSError as error:
            holder = os.pread(descriptor, 1000, 0).decode(errors="replace").strip() or "a process that left no name"
            os.close(descriptor)
            if error.errno in (errno.EAGAIN, errno.EACCES):
                gone = f"stop it, or save to another folder; if its machine is gone with it, remove {path}"
                raise RuntimeError(_BUSY.format(folder, holder, f"Wait for it, {gone}")) from None
            return None  # no locks here
        os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        there, here = os.stat(path), os.fstat(descriptor)
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)
