"""The sources are formatted and lint-free, by the tools and settings that are in the repository."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent
C_SUFFIXES = {".c", ".h", ".cc", ".cu"}


def tool(name: str) -> str:
    """The program beside the interpreter (requirements.txt installs all of them there), else on the PATH."""
    beside = pathlib.Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if not found:
        pytest.skip(f"{name} is not installed")
    return found


def check(*command: str) -> None:
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def sources(folders: list[str], suffixes: set[str]) -> list[str]:
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in suffixes]
    assert files
    return sorted(str(path.relative_to(ROOT)) for path in files)


def python_sources() -> list[str]:
    return sources(["bazel", "docs", "examples", "tests", "torch_ext"], {".py"})


def test_clang_format() -> None:
    program = tool("clang-format")
    version = subprocess.run([program, "--version"], capture_output=True, text=True).stdout
    if " 14." not in version:
        pytest.skip(f"formatted by clang-format 14, found {version.strip()}")
    folders = ["csrc", "cuda", "examples/c", "tests/core", "tests/cuda", "tests/fuzz"]
    check(program, "--dry-run", "-Werror", "--style=file", *sources(folders, C_SUFFIXES))


def test_ruff_format() -> None:
    check(tool("ruff"), "format", "--no-cache", "--check", *python_sources())


def test_ruff_lint() -> None:
    check(tool("ruff"), "check", "--no-cache", *python_sources())


def test_mypy() -> None:
    """The package, and the benchmark, which is a package of tests/."""
    cache = os.environ.get("TEST_TMPDIR", "/tmp")
    check(tool("mypy"), "--cache-dir", cache, "-p", "torch_ext", "-p", "bench")
