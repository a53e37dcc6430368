"""Makes the package's metadata for wheels and source distributions (core metadata 2.4) from pyproject.toml."""

import pathlib
import re
from collections.abc import Iterator
from typing import Any

HEADER = "csrc/torch_ext_types.h"


def project(pyproject: str) -> dict[str, Any]:
    """Returns the table [project] of pyproject.toml's text. Python 3.10 has no TOML parser: uses tomli, or pip's."""
    try:
        import tomllib as toml
    except ImportError:
        try:
            import tomli as toml
        except ImportError:
            from pip._vendor import tomli as toml
    table: dict[str, Any] = toml.loads(pyproject)["project"]
    return table


def header_version(header: str) -> str:
    """Returns major.minor.patch from TX_VERSION_* in the text of csrc/torch_ext_types.h."""
    parts = dict(re.findall(r"#define TX_VERSION_(MAJOR|MINOR|PATCH) (\d+)", header))
    return ".".join(parts[part] for part in ("MAJOR", "MINOR", "PATCH"))


def text(table: dict[str, Any], version: str, readme: str) -> str:
    """Returns the text of METADATA (wheel) or PKG-INFO (source distribution). readme: the README's text."""
    fields = [f"{name}: {value}\n" for name, value in _fields(table, version)]
    return "".join(fields) + "\n" + readme


def _fields(table: dict[str, Any], version: str) -> Iterator[tuple[str, str]]:
    yield "Metadata-Version", "2.4"
    yield "Name", table["name"]
    yield "Version", version
    yield "Summary", table["description"]
    yield "Author", ", ".join(author["name"] for author in table["authors"])
    yield "License-Expression", table["license"]
    for path in table["license-files"]:
        yield "License-File", path
    yield "Keywords", ",".join(table["keywords"])
    for classifier in table["classifiers"]:
        yield "Classifier", classifier
    for label, url in table.get("urls", {}).items():
        yield "Project-URL", f"{label}, {url}"
    yield "Requires-Python", table["requires-python"]
    for requirement in table["dependencies"]:
        yield "Requires-Dist", requirement
    for extra, requirements in table["optional-dependencies"].items():
        yield "Provides-Extra", extra
        for requirement in requirements:
            yield "Requires-Dist", f'{requirement}; extra == "{extra}"'
    yield "Description-Content-Type", "text/markdown"


def of_tree(root: pathlib.Path) -> tuple[str, str]:
    """Returns the version and the metadata of the sources in the folder `root`."""
    version = header_version((root / HEADER).read_text())
    table = project((root / "pyproject.toml").read_text())
    return version, text(table, version, (root / table["readme"]).read_text())
