"""Files while they are written: counted, with checksums, and with the error that torch.save would bury."""

import contextlib
import errno
import functools
import os
import shutil
import zlib
from typing import Any

import torch

STALE = 600.0
"""Seconds without a change after which what a save left is taken for abandoned, where no lock can say so."""

_BUFFER = 1 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT)


class NewFile:
    """A stream for torch.save.

    After an error it goes on counting: torch.save would answer with one about its own positions, and what the whole
    would have needed is worth knowing. `check` raises the first one.
    """

    def __init__(self, path: str | os.PathLike[str], permissions: int | None = 0o666) -> None:
        """permissions: of a file that must not be there yet; None for one that must."""
        # Without Python code between the descriptor and who closes it: an interrupt comes in no other place.
        opener = None if permissions is None else functools.partial(os.open, mode=permissions)
        self._file = open(path, "r+b" if permissions is None else "xb", buffering=_BUFFER, opener=opener)
        self._error: BaseException | None = None
        self.size = 0
        """Bytes so far, as if there had been no error."""
        self.crc32 = 0
        """Of what was written since it was last set."""

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
        """At the end, all at once."""

    def put(self, obj: Any) -> None:
        """torch.save."""
        try:
            torch.save(obj, self)  # type: ignore[arg-type]
        except Exception as error:
            self.check()
            before: BaseException | None = error
            while before is not None:
                if isinstance(before, KeyboardInterrupt):  # on the way here: then torch closed what had no end
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
        """Says nothing of what was not written: that was said before."""
        with contextlib.suppress(OSError):
            self._file.close()


def refuse_full(error: BaseException, what: str, needed: str, folder: str | os.PathLike[str]) -> None:
    """Where the error says that the disk is full: OSError with what would have done. Called when what was written has
    been removed."""
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
    """Brings the names of its files to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that bring names there by themselves
            raise
    finally:
        os.close(descriptor)
