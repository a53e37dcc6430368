"""Tests that the libraries export exactly the functions of their public headers, and need no library but libc and
libm."""

import pathlib
import re
import subprocess
from typing import NamedTuple

import pytest

import torch_ext

ROOT = pathlib.Path(__file__).parent.parent.parent


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


class Library(NamedTuple):
    """A library, and the headers that declare its functions."""

    headers: list[str]  # names of files in csrc
    path: pathlib.Path
    function: str  # one function that it has


LIBRARIES = {
    "cpu": Library(
        [path.name for path in (ROOT / "csrc").glob("torch_ext*.h") if path.name != "torch_ext_cuda.h"],
        pathlib.Path(torch_ext.library_path()),
        "tx_adamw",
    ),
    "delta": Library(
        ["torch_ext_delta.h", "torch_ext_types.h"],
        pathlib.Path(torch_ext.library_path()).with_name("libtorch_ext_delta.so"),
        "tx_delta_apply",
    ),
    "cuda": Library(["torch_ext_cuda.h"], ROOT / "cuda/libtorch_ext_cuda.so", "tx_cuda_adamw"),
}


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> Library:
    found = LIBRARIES[request.param]
    if not found.path.exists():
        pytest.skip(f"{found.path.name} is not built")
    return found


def declared(library: Library) -> set[str]:
    """Returns the functions that the library's headers mark TX_API."""
    header = "".join((ROOT / "csrc" / name).read_text() for name in library.headers)
    without_comments = re.sub(r"/\*.*?\*/", "", header, flags=re.DOTALL)
    return set(re.findall(r"^TX_API\b[^;(]*?(tx_\w+)\(", without_comments, flags=re.MULTILINE))


def exported(library: Library) -> set[str]:
    symbols = run("nm", "--dynamic", "--defined-only", "--format=posix", str(library.path))
    return {line.split()[0] for line in symbols.splitlines()}


def test_the_headers_declare_functions(library: Library) -> None:
    assert library.function in declared(library)


def test_exports_are_exactly_the_public_headers(library: Library) -> None:
    assert exported(library) == declared(library)


def test_no_library_is_needed_but_libc_and_libm(library: Library) -> None:
    dynamic = run("readelf", "--dynamic", "--wide", str(library.path))
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic))
    needed = {name for name in needed if not name.startswith("ld-linux")}  # libc's loader, for thread-local variables
    assert needed <= {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1"}
