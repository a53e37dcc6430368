"""Tests that every Python that the package supports has the names of the standard library that the sources use. mypy's
stubs tell which version has a name, so the Python that runs the tests does not matter. Not detected: arguments that
were added later, and changes in bug-fix releases."""

import ast
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator

from checked_sources import ROOT, python_sources, tool

# The oldest Python, which lacks names that came later, and the newest that mypy's stubs cover, which lacks removed
# names.
PYTHONS = ("3.10", "3.14")

# (source, name): uses that depend on the Python version at run time.
GUARDED = {("bazel/core_metadata.py", "tomllib")}


def used(text: str) -> Iterator[str]:
    """Yields the modules that a source imports, as "module", and the names that it imports or reads from them, as
    "module:name"."""
    tree = ast.parse(text)
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
                modules[alias.asname or alias.name] = alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}:{alias.name}" for alias in node.names)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (name := ast.unparse(node.value)) in modules:
            yield f"{modules[name]}:{node.attr}"


def of_standard_library(names: Iterator[str]) -> set[str]:
    return {name for name in names if re.split("[.:]", name)[0] in {*sys.stdlib_module_names, "distutils", "tomllib"}}


def absent(names: set[str], folder: pathlib.Path) -> dict[str, set[str]]:
    """Returns Python -> the names that it lacks and another Python has. Names that all stubs lack, which are private,
    are ignored."""
    ordered = sorted(names)
    lines = [
        f"from {module} import {name} as _{i}" if name else f"import {module} as _{i}"
        for i, (module, _, name) in enumerate(each.partition(":") for each in ordered)
    ]
    program = folder / "names.py"
    program.write_text("\n".join(lines) + "\n")
    lacks: dict[str, set[str]] = {}
    for python in PYTHONS:
        options = ["--config-file=", "--no-error-summary", "--cache-dir", str(folder / "cache")]
        command = [tool("mypy"), *options, "--python-version", python, str(program)]
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert result.returncode in (0, 1), result.stdout + result.stderr
        found = re.findall(r"^\S*names\.py:(\d+): error", result.stdout, re.MULTILINE)
        lacks[python] = {ordered[int(line) - 1] for line in found}
    unknown = set.intersection(*lacks.values())
    return {python: found - unknown for python, found in lacks.items() if found - unknown}


def test_it_is_in_every_python(tmp_path: pathlib.Path) -> None:
    users: dict[str, list[str]] = {}
    for file in python_sources():
        for name in of_standard_library(used((ROOT / file).read_text())):
            if (file, name) not in GUARDED:
                users.setdefault(name, []).append(file)
    assert len(users) > 300
    found = absent(set(users), tmp_path)
    assert {python: {name: users[name] for name in names} for python, names in found.items()} == {}


USES = """
import ast, distutils.util, os.path, sys, tomllib
import itertools as it
from datetime import UTC, datetime
ast.Num, ast.parse, it.batched, it.chain, os.path.join, sys._current_frames, sys._no_stub_knows_this
"""


def test_what_a_python_lacks_is_seen(tmp_path: pathlib.Path) -> None:
    found = absent(of_standard_library(used(USES)), tmp_path)
    assert found == {
        "3.10": {"tomllib", "datetime:UTC", "itertools:batched"},
        "3.14": {"distutils.util", "ast:Num"},
    }
