"""A small disk: a tmpfs that only this process sees, and a file that fills it."""

import contextlib
import ctypes
import os
import pathlib
from collections.abc import Iterator

_NEW_MOUNTS, _PRIVATE = 0x00020000, 1 << 18 | 1 << 14  # CLONE_NEWNS; MS_PRIVATE | MS_REC


def mount(folder: pathlib.Path, nbytes: int) -> str:
    """Mounts a tmpfs that disappears with this process. Returns why that is not permitted, "" if it was."""
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"size={nbytes}".encode()
    if (
        libc.unshare(_NEW_MOUNTS)
        or libc.mount(b"none", b"/", None, ctypes.c_ulong(_PRIVATE), None)
        or libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", ctypes.c_ulong(0), options)
    ):
        return f"no tmpfs may be mounted: {os.strerror(ctypes.get_errno())}"
    return ""


def free(folder: pathlib.Path) -> int:
    """Returns how many bytes are free."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


@contextlib.contextmanager
def filled(filler: pathlib.Path, left: int) -> Iterator[None]:
    """Within the context, a file fills the disk so that no more than `left` bytes are free."""
    filler.write_bytes(bytes(max(0, free(filler.parent) - left)))
    try:
        yield
    finally:
        filler.unlink()
