"""Where tests find the wheel: beside the sources where Bazel runs them, in bazel-bin where they are run by hand."""

import pathlib

ROOT = pathlib.Path(__file__).absolute().parent.parent


def wheel() -> pathlib.Path:
    """The one wheel that was built. ValueError where there is none, or more than one."""
    (path,) = list(ROOT.glob("torch_ext-*.whl")) or list((ROOT / "bazel-bin").glob("torch_ext-*.whl"))
    return path
