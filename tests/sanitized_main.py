"""Runs pytest_main under the address and undefined-behaviour sanitizers, with which libtorch_ext.so was built:

    bazel test --config=asan //tests/torch:sanitized

The sanitizer's library must be loaded before any other, so this starts Python again with the library preloaded. If that
is not possible, each test is skipped with the reason.
"""

import ctypes.util
import os
import pathlib
import subprocess
import sys

import pytest
import pytest_main

PRELOADED = "TX_ASAN_PRELOADED"
WHY_NOT = "TX_ASAN_WHY_NOT"

# No leak checks: Python and torch keep memory until the process ends. A too large allocation returns NULL, as usual.
OPTIONS = "detect_leaks=0:allocator_may_return_null=1:detect_odr_violation=0:quarantine_size_mb=64"


def libraries() -> list[str]:
    """Returns the libraries to preload: the sanitizer's and the C++ library, whose exceptions the sanitizer looks up
    when it starts. Empty if the sanitizer is not installed."""
    try:
        found = subprocess.run(
            ["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return []
    thrown = ctypes.util.find_library("stdc++")
    return [found.strip(), thrown] if os.path.isabs(found.strip()) and thrown else []


def environment() -> dict[str, str]:
    """Returns the environment variables of a process with the sanitizers."""
    return {"LD_PRELOAD": " ".join(libraries()), "ASAN_OPTIONS": OPTIONS, "UBSAN_OPTIONS": "print_stacktrace=1"}


def why_not() -> str:
    """Returns why the sanitizers cannot be used here; "" if they can."""
    if not libraries():
        return "gcc has no libasan.so here"
    library = pathlib.Path(__file__).absolute().parents[1] / "libtorch_ext.so"  # in Bazel's runfiles
    if not library.exists() or b"__asan_init" not in library.read_bytes():
        return "libtorch_ext.so was built without the sanitizers: bazel test --config=asan"
    done = subprocess.run(
        [sys.executable, "-c", "import torch"], env=os.environ | environment(), capture_output=True, text=True
    )
    return "" if done.returncode == 0 else f"torch does not load with libasan: {done.stderr.strip()[-200:]}"


class _Skips:
    """A plugin that skips all tests."""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            item.add_marker(pytest.mark.skip(reason=os.environ[WHY_NOT]))


def main() -> int:
    if PRELOADED not in os.environ and not (reason := why_not()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | environment() | {PRELOADED: "1"})
    if PRELOADED not in os.environ:
        os.environ[WHY_NOT] = f"the address sanitizer under Python: {reason}"
    return pytest_main.main(*([] if PRELOADED in os.environ else [_Skips()]))


if __name__ == "__main__":
    sys.exit(main())
