"""libtorch_ext.so shows the public header's functions and nothing else, and asks for no library but libc and libm."""

import pathlib
import re
import subprocess

import torch_ext

ROOT = pathlib.Path(__file__).parent.parent.parent


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def declared() -> set[str]:
    """The functions that csrc/torch_ext.h marks TX_API."""
    header = (ROOT / "csrc/torch_ext.h").read_text()
    without_comments = re.sub(r"/\*.*?\*/", "", header, flags=re.DOTALL)
    return set(re.findall(r"^TX_API\b[^;(]*?(tx_\w+)\(", without_comments, flags=re.MULTILINE))


def exported() -> set[str]:
    symbols = run("nm", "--dynamic", "--defined-only", "--format=posix", torch_ext.library_path())
    return {line.split()[0] for line in symbols.splitlines()}


def test_the_header_declares_functions() -> None:
    assert "tx_adamw" in declared()


def test_exports_are_exactly_the_public_header() -> None:
    assert exported() == declared()


def test_no_library_is_needed_but_libc_and_libm() -> None:
    dynamic = run("readelf", "--dynamic", "--wide", torch_ext.library_path())
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic))
    needed = {name for name in needed if not name.startswith("ld-linux")}  # libc's loader: where threads' variables are
    assert needed <= {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0"}
