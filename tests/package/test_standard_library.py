"""What the sources use of the standard library is there in every Python that the package is for, whichever runs the
tests: mypy's stubs know in which it is. Arguments that came later, and what a release of bug fixes brought, they don't
know."""

import ast
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator

from checked_sources import ROOT, python_sources, tool

# The oldest, for what came later, and the newest that mypy's stubs are whole for, for what has gone since.
PYTHONS = ("3.10", "3.14")

# Sources that look first which Python they are run by.
GUARDED = {("bazel/core_metadata.py", "tomllib")}


def used(text: str) -> Iterator[str]:
    """Modules of the standard library, and names in them behind a colon, that the source imports or reads."""
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
    """Those that a Python lacks and another one has. What no stub knows, a private name, is not judged."""
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
