"""Files while they are written: counted, with checksums, and with the error that torch.save would hide."""

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
"""Seconds without a change after which the files of a save are taken for abandoned, where no lock can tell."""

_BUFFER = 1 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT)


class NewFile:
    """A stream for torch.save; as a context manager it is closed at the end, and removed after an exception.

    After a write has failed it goes on counting: torch.save would raise an error about its own positions instead, and
    the message says how many bytes were needed. `check` raises the first error.
    """

    def __init__(self, path: str | os.PathLike[str], permissions: int | None = 0o666) -> None:
        """permissions: of a file that must not be there yet; None for one that must."""
        # No Python code runs between the system call and the object that closes it: no interrupt is raised there.
        opener = None if permissions is None else functools.partial(os.open, mode=permissions)
        self._file = open(path, "r+b" if permissions is None else "xb", buffering=_BUFFER, opener=opener)
        self.path = path
        self._error: BaseException | None = None
        self.size = 0
        """Bytes so far, as if there had been no error."""
        self.crc32 = 0
        """Of what was written since it was last set."""

    def __enter__(self) -> "NewFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            with contextlib.suppress(OSError):  # it may have been renamed before an interrupt
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
        """Does nothing: `sync` does it once, at the end."""

    def put(self, obj: Any) -> None:
        """torch.save."""
        try:
            torch.save(obj, self)  # type: ignore[arg-type]
        except Exception as error:
            self.check()
            before: BaseException | None = error
            while before is not None:
                if isinstance(before, KeyboardInterrupt):  # after which torch closed an unfinished archive
                    raise before from None
                before = before.__context__
            raise
        self.check()

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def sync(self) -> None:
        """To the disk."""
        self.check()
        self._file.flush()
        os.fsync(self._file.fileno())

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        """Raises nothing: `sync` and `check` did."""
        with contextlib.suppress(OSError):
            self._file.close()


def refuse_full(error: BaseException, what: str, needed: str, folder: str | os.PathLike[str]) -> None:
    """Where the error is a full disk: OSError that says how much was needed and how much is free. Called when what was
    written has been removed."""
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
    """Makes the names of its files durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems on which names are durable at once
            raise
    finally:
        os.close(descriptor)
