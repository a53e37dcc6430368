"""Runs pytest on the files given, for `bazel test` and by hand: python tests/pytest_main.py tests/torch/test_adamw.py.

The result of each test is written to $XML_OUTPUT_FILE, from which tests/run.sh computes its last line. A file without a
single test is a failure (pytest's exit status 5).
"""

import gc
import importlib.util
import os
import sys

import pytest

# abspath, not realpath: under Bazel this file is a link in the runfiles, and the library is next to the link.
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class _Frozen:
    """A plugin that freezes the objects of torch and pytest, so that garbage collections skip them."""

    def pytest_collection_finish(self) -> None:
        gc.collect()
        gc.freeze()


def main(*plugins: object) -> int:
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:  # no origin: a folder named torch, such as tests/torch
        sys.exit(
            f"{sys.executable} has no torch: set TORCH_EXT_PYTHON to an interpreter that has, or call tests/run.sh."
        )
    options = ["--rootdir", _ROOT, "-c", os.path.join(_ROOT, "pyproject.toml"), "-p", "no:cacheprovider"]
    if "XML_OUTPUT_FILE" in os.environ:
        options.append("--junitxml=" + os.environ["XML_OUTPUT_FILE"])
    return pytest.main(options + sys.argv[1:], plugins=[_Frozen(), *plugins])


if __name__ == "__main__":
    sys.exit(main())
