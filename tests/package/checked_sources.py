"""The sources that tools look at, and where these tools are."""

import pathlib
import shutil
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent


def tool(name: str) -> str:
    """The program beside the interpreter (requirements.txt installs all of them there), else on the PATH."""
    beside = pathlib.Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if not found:
        pytest.skip(f"{name} is not installed")
    return found


def sources(folders: list[str], suffixes: set[str]) -> list[str]:
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in suffixes]
    assert files
    return sorted(str(path.relative_to(ROOT)) for path in files)


def python_sources() -> list[str]:
    return sources(["bazel", "docs", "examples", "tests", "torch_ext"], {".py"})
