"""The zip archives that torch.save writes: their records' checksums, which torch.load does not compare."""

import errno
import re
import zipfile
from typing import IO

_ZIP = b"PK\x03\x04"  # how they begin


def damaged_record(stream: IO[bytes]) -> str | None:
    """The name of the first record that has another checksum than when it was saved; None where there is none, or the
    stream, which is at its beginning, is of an older format. Raises any kind of error where the archive is damaged."""
    if stream.read(len(_ZIP)) != _ZIP:
        return None
    try:
        with zipfile.ZipFile(stream) as archive:
            return archive.testzip()
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise zipfile.BadZipFile("its directory has places before the file begins") from error


def summary(error: Exception) -> str:
    """The first line of its message, or what `foreign_class` finds in it."""
    if (found := foreign_class(error)) is not None:
        return f"it holds {found}, which is neither a tensor nor a plain value"
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def foreign_class(error: Exception) -> str | None:
    """What torch.load(weights_only=True) refused to make an object of; None for any other error of it."""
    named = re.search(r"GLOBAL (\S+)", str(error))
    return named[1] if named else None
