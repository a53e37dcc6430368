"""`NewFile`, a file being written: counts bytes, computes a checksum, keeps the error that torch.save would hide."""

import contextlib
import errno
import functools
import os
import shutil
import zlib
from types import TracebackType
from typing import Any

import torch

STALE = 600.0
"""Seconds without a change after which a save's files count as abandoned, if the file system has no locks."""

_BUFFER = 1 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT)


class NewFile:
    """A stream to write a file with torch.save. As a context manager it closes the file, and removes it after an
    exception.

    After a failed write it discards further data, but keeps counting. Otherwise torch.save would hide the error behind
    one about its own positions, and the message could not say how many bytes were needed. `check` raises the error.
    """

    def __init__(self, path: str | os.PathLike[str], permissions: int | None = 0o666) -> None:
        """Opens the file. permissions: the mode of the new file, which must not exist; None: the file must exist."""
        # No Python code runs between the system call and the object that closes the file, so no KeyboardInterrupt can
        # leak the descriptor.
        opener = None if permissions is None else functools.partial(os.open, mode=permissions)
        self._file = open(path, "r+b" if permissions is None else "xb", buffering=_BUFFER, opener=opener)
        self.path = path
        self._error: BaseException | None = None
        self.size = 0
        """Bytes written so far; after an error, bytes that would have been written."""
        self.crc32 = 0
        """Checksum of the data since the caller last reset it to 0."""

    def __enter__(self) -> "NewFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            with contextlib.suppress(OSError):  # the file may have been renamed just before an interrupt
                os.unlink(self.path)
        self.close()

    def write(self, data: Any) -> int:
        nbytes = memoryview(data).nbytes
        try:
            self.size += nbytes
            self.crc32 = zlib.crc32(data, self.crc32)
            if self._error is None:
                self._file.write(data)
        except BaseException as error:
            self._error = self._error or error
        return nbytes

    def flush(self) -> None:
        """Does nothing: `sync` flushes once, at the end."""

    def put(self, obj: Any) -> None:
        """Writes `obj` with torch.save. If a write failed or was interrupted, raises that error, not torch's own."""
        try:
            torch.save(obj, self)  # type: ignore[arg-type]
        except Exception as error:
            self.check()
            before: BaseException | None = error
            while before is not None:
                if isinstance(before, KeyboardInterrupt):  # torch's error is that of closing the unfinished archive
                    raise before from None
                before = before.__context__
            raise
        self.check()

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def sync(self) -> None:
        """Flushes the file to the disk. Raises the first error of a write."""
        self.check()
        self._file.flush()
        os.fsync(self._file.fileno())

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        """Closes the file. Raises no error; `sync` and `check` do that."""
        with contextlib.suppress(OSError):
            self._file.close()


def refuse_full(error: BaseException, what: str, needed: str, folder: str | os.PathLike[str]) -> None:
    """Raises OSError with the needed and free bytes if `error` is a full disk or quota. Does nothing for other errors.
    Call it after the incomplete file has been removed, so that the free bytes are right."""
    if not isinstance(error, OSError) or error.errno not in _FULL:
        return
    try:
        free = f"{shutil.disk_usage(folder).free} bytes are free"
    except OSError:
        free = "how much is free is not known"
    quota = "; a quota may allow less" if error.errno == errno.EDQUOT else ""
    raise OSError(
        error.errno, f"{os.strerror(error.errno)}: {what} needs {needed}, and {free} there now{quota}"
    ) from error


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Makes the names of the files in the folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # on such file systems names are durable at once
            raise
    finally:
        os.close(descriptor)
