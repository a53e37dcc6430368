"""Finds the wheel for tests: next to the sources if Bazel runs the test, in bazel-bin if it is run by hand."""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).absolute().parent.parent


def wheel() -> pathlib.Path:
    """Returns the path of the wheel. Raises ValueError if there is none, or more than one."""
    (path,) = list(ROOT.glob("torch_ext-*.whl")) or list((ROOT / "bazel-bin").glob("torch_ext-*.whl"))
    return path


def install(target: pathlib.Path) -> None:
    """Installs the wheel into a folder, without its requirements."""
    # -I ignores PYTHONPATH and the current folder, so that the repository's own package is not used.
    pip = [sys.executable, "-I", "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*pip, "--target", str(target), str(wheel())], check=True)
