"""Runs pytest_main with a libtorch_ext.so that is built with the address and undefined-behaviour sanitizers:

    bazel test --config=asan //tests/torch:sanitized

The sanitizer's library has to be loaded before all others, so this program restarts Python with the library preloaded.
If that is not possible, each test is skipped with the reason.
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

# No leak detection: Python and torch keep memory until the process ends. A request for too much memory returns NULL, as
# it does without the sanitizer.
OPTIONS = "detect_leaks=0:allocator_may_return_null=1:detect_odr_violation=0:quarantine_size_mb=64"


def libraries() -> list[str]:
    """Returns the libraries to preload: the sanitizer's, and libstdc++, in which the sanitizer looks up the functions
    that throw C++ exceptions when it starts. Empty if they are not installed."""
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
    """Returns why this machine or build cannot run tests with the sanitizers; "" if it can."""
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
    """A pytest plugin that skips all tests."""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            item.add_marker(pytest.mark.skip(reason=os.environ[WHY_NOT]))


def main() -> int:
    """Restarts Python with the sanitizer if it can, then runs pytest. Returns its exit status."""
    if PRELOADED not in os.environ and not (reason := why_not()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | environment() | {PRELOADED: "1"})
    if PRELOADED not in os.environ:
        os.environ[WHY_NOT] = f"the address sanitizer under Python: {reason}"
    return pytest_main.main(*([] if PRELOADED in os.environ else [_Skips()]))


if __name__ == "__main__":
    sys.exit(main())
