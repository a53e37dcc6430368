"""Finds the libraries and the headers of the C interface: in a wheel, in Bazel's runfiles, or in the repository."""

import functools
import os
from collections.abc import Iterable

# The folder torch_ext. Not realpath: under Bazel this file is a symbolic link, and the library is near the link, not
# near its target.
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_FOLDERS = (
    PACKAGE,  # a wheel
    os.path.dirname(PACKAGE),  # Bazel's runfiles
    os.path.join(os.path.dirname(PACKAGE), "bazel-bin"),  # the repository after `bazel build //:torch_ext`
)


@functools.cache
def library_path() -> str:
    """Returns the file that holds the operators, for `torch.ops.load_library(torch_ext.library_path())`.

    Raises ImportError if it was not built.
    """
    return _built("libtorch_ext.so", "torch_ext")


def delta_library_path() -> str:
    """Returns the path of libtorch_ext_delta.so, for inference engines: it has only the functions of torch_ext_delta.h
    and torch_ext_types.h.

    Raises ImportError if it was not built.
    """
    return _built("libtorch_ext_delta.so", "libtorch_ext_delta.so")


def _built(name: str, target: str) -> str:
    if path := _find(name, _FOLDERS):
        return path
    raise ImportError(
        f"{name} is in none of {', '.join(_FOLDERS)}: build it with `bazel build //:{target}` "
        "in the repository's root, or install the wheel (`bazel build //:wheel`)."
    )


def _find(name: str, folders: Iterable[str]) -> str | None:
    """Returns the path of the file in the first of the folders that has it."""
    files = (os.path.join(folder, name) for folder in folders)
    return next(filter(os.path.isfile, files), None)


def get_include() -> str:
    """Returns the folder with torch_ext.h and the other headers of the C interface, for a C or C++ compiler's -I.

    `python -m torch_ext config --cflags --libs` prints this folder and the library's as compiler flags.
    Raises ImportError if there is none.
    """
    root = os.path.dirname(PACKAGE)
    folders = (os.path.join(PACKAGE, "include"), os.path.join(root, "csrc"))  # a wheel; the repository
    if path := _find("torch_ext.h", folders):
        return os.path.dirname(path)
    raise ImportError(f"torch_ext.h is in none of {', '.join(folders)}: reinstall the wheel.")
