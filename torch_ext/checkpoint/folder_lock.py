"""A lock for saving to a folder. The lock file names the process that holds it. Not every file system has locks."""

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


class _Lock(NamedTuple):
    descriptor: int
    save_id: str
    thread: threading.Thread


_locks: dict[tuple[int, str], _Lock] = {}  # by process id and folder: a forked process has this dict, but not the lock


def acquire(folder: Path, save_id: str) -> bool:
    """Locks the folder until `release` or the end of the process. Returns False if it cannot be locked. Raises
    RuntimeError, with the name of the lock's holder, if another save is running.

    If a save of the calling thread, or of a thread that has ended, still holds the lock, that save is over: its lock is
    released first. The lock is fcntl's: a forked worker would inherit flock's and keep it after this process is killed.
    """
    key = _key(folder)
    former = _locks.get(key)
    if former is not None:
        if former.thread.is_alive() and former.thread is not threading.current_thread():
            raise RuntimeError(_BUSY.format(folder, f"thread {former.thread.name!r} of this process", "Wait for it"))
        release(folder, former.save_id)
    descriptor = _locked(folder, folder / LOCK)
    if descriptor is None:
        return False
    since = time.strftime("%Y-%m-%d %H:%M:%S %z")
    _locks[key] = _Lock(descriptor, save_id, threading.current_thread())
    holder = f"process {os.getpid()} on {socket.gethostname()}, since {since} (save {save_id})\n".encode()
    with contextlib.suppress(OSError):  # on a full disk the lock works, but error messages cannot name the holder
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, holder, 0)
    return True


def release(folder: Path, save_id: str) -> None:
    """Unlocks the folder if this save holds the lock."""
    if has(folder, save_id):
        descriptor = _locks.pop(_key(folder)).descriptor
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)  # so that this name is not reported while the next save has the lock
        os.close(descriptor)


def has(folder: Path, save_id: str) -> bool:
    lock = _locks.get(_key(folder))
    return lock is not None and lock.save_id == save_id


def _key(folder: Path) -> tuple[int, str]:
    return os.getpid(), os.path.realpath(folder)


def _locked(folder: Path, path: Path) -> int | None:
    """Returns the descriptor of the locked file; None if it cannot be locked. Raises RuntimeError if another process
    holds the lock."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    while True:
        try:
            descriptor = os.open(path, flags, 0o666)
        except PermissionError:  # the file belongs to another user
            return None
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(descriptor, path):  # else the file was removed between open and lock: try again
                return descriptor
        except OSError as error:
            holder = os.pread(descriptor, 1000, 0).decode(errors="replace").strip() or "a process that left no name"
            os.close(descriptor)
            if error.errno in (errno.EAGAIN, errno.EACCES):
                gone = f"stop it, or save to another folder; if its machine is gone with it, remove {path}"
                raise RuntimeError(_BUSY.format(folder, holder, f"Wait for it, {gone}")) from None
            return None  # the file system has no locks
        os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        there, here = os.stat(path), os.fstat(descriptor)
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)
