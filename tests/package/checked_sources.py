"""Helpers for tests that run tools (ruff, clang-format, mypy) on the repository's sources: finds sources and tools."""

import pathlib
import shutil
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent


def tool(name: str) -> str:
    """Returns the path of a program: in the interpreter's folder, where requirements.txt installs all of them, or else
    on the PATH. Skips the test if there is none."""
    beside = pathlib.Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if not found:
        pytest.skip(f"{name} is not installed")
    return found


def sources(folders: list[str], suffixes: set[str]) -> list[str]:
    """Returns the files below the folders with one of the suffixes, as paths from the repository's root."""
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in suffixes]
    assert files
    return sorted(str(path.relative_to(ROOT)) for path in files)


def python_sources() -> list[str]:
    return sources(["bazel", "docs", "examples", "tests", "torch_ext"], {".py"})
