"""Runs pytest on the files given, for `bazel test` and by hand: python tests/pytest_main.py tests/torch/test_adamw.py.

Passes and skips are written case by case to $XML_OUTPUT_FILE, from which tests/run.sh adds up its closing line. A file
without a single test is a failure (pytest's exit status 5).
"""

import os
import pathlib
import sys

import pytest

# abspath, not resolve: under Bazel this file is a link in the runfiles, and the library lies beside the link.
ROOT = pathlib.Path(os.path.abspath(__file__)).parent.parent


def main() -> int:
    # The repository's root for torch_ext and examples, tests/ for the oracle; for this process and those it starts.
    # tests/ comes last because it has a folder named torch.
    for path in (str(ROOT), str(ROOT / "tests")):
        if path not in sys.path:
            sys.path.append(path)
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p and not p.startswith((sys.prefix, sys.base_prefix)))
    options = ["--rootdir", str(ROOT), "-p", "no:cacheprovider", "-ra"]
    if "XML_OUTPUT_FILE" in os.environ:
        options.append("--junitxml=" + os.environ["XML_OUTPUT_FILE"])
    return pytest.main(options + sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
