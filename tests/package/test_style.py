"""Tests that the sources are formatted and free of lint, by the tools and settings of the repository."""

import subprocess

import pytest
from checked_sources import ROOT, python_sources, sources, tool

C_SUFFIXES = {".c", ".h", ".cc", ".cu"}


def check(*command: str) -> None:
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


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
