"""Reads and runs the code of the pages of docs/recipes."""

import importlib.util
import os
import pathlib
import re
from typing import Any

import pytest

PAGES = pathlib.Path(os.path.abspath(__file__)).parents[1] / "docs" / "recipes"


def blocks(page: str, language: str) -> list[str]:
    """Returns the code blocks of docs/recipes/PAGE.md in a language, in their order."""
    text = (PAGES / f"{page}.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def run(page: str, block: int, names: dict[str, Any]) -> dict[str, Any]:
    """Runs a Python block of the page with the global names `names`, which it may change; returns them."""
    source = blocks(page, "python")[block]
    exec(compile(source, f"docs/recipes/{page}.md, Python block {block}", "exec"), names)
    return names


def needs(framework: str) -> pytest.MarkDecorator:
    """Skips a test if the framework is not installed: tests/requirements.txt does not have the large ones."""
    there = importlib.util.find_spec(framework) is not None
    return pytest.mark.skipif(not there, reason=f"{framework} is not installed; the case `rebuilt` runs without it")
