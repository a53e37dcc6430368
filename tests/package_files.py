"""Where tests find the wheel: beside the sources where Bazel runs them, in bazel-bin where they are run by hand."""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).absolute().parent.parent


def wheel() -> pathlib.Path:
    """The one wheel that was built. ValueError where there is none, or more than one."""
    (path,) = list(ROOT.glob("torch_ext-*.whl")) or list((ROOT / "bazel-bin").glob("torch_ext-*.whl"))
    return path


def install(target: pathlib.Path) -> None:
    """The wheel into a folder, without what it requires."""
    # -I ignores PYTHONPATH and the current folder, so that the repository's own package can't be meant.
    pip = [sys.executable, "-I", "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*pip, "--target", str(target), str(wheel())], check=True)
