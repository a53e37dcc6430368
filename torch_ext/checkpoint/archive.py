"""Checks the zip archives that torch.save writes: torch.load does not compare the checksums of their records."""

import errno
import re
import zipfile
from typing import IO

_ZIP = b"PK\x03\x04"  # the first bytes of a zip archive


def damaged_record(stream: IO[bytes]) -> str | None:
    """Returns the name of the first record whose checksum is wrong. None if all are right, or the stream holds no zip
    archive (torch's older format). The stream must be at its beginning. Raises any kind of error for a damaged archive.
    """
    if stream.read(len(_ZIP)) != _ZIP:
        return None
    try:
        with zipfile.ZipFile(stream) as archive:
            return archive.testzip()
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise zipfile.BadZipFile("its zip directory has offsets before the beginning of the file") from error


def summary(error: Exception) -> str:
    """Returns one line about an error of torch.load: the first of its message, or the class that was refused."""
    if (found := foreign_class(error)) is not None:
        return f"it holds {found}, which is neither a tensor nor a plain value"
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def foreign_class(error: Exception) -> str | None:
    """Returns the name of the class or function that torch.load(weights_only=True) refused; None for other errors."""
    named = re.search(r"GLOBAL (\S+)", str(error))
    return named[1] if named else None
