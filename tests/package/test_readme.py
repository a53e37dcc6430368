"""What the README says of the library is so, where a test can tell."""

import ctypes
import os
import pathlib
import re

import torch  # noqa: F401  the library looks for it in the process

from torch_ext.native import library

ROOT = pathlib.Path(os.path.abspath(__file__)).parents[2]
README = (ROOT / "README.md").read_text()


def library_schemas() -> list[str]:
    schema_of = library.function("tx_operator_schema", ctypes.c_int32, restype=ctypes.c_char_p)
    return [schema_of(i).decode() for i in range(len(library.operators()))]


def test_operators_are_shown_argument_for_argument() -> None:
    block = README.split("## Operators")[1].split("```")[1]
    shown = [" ".join(schema.split()) for schema in re.split(r"(?<=-> \(\))\n", block) if schema.strip()]
    assert shown == library_schemas()


def test_every_operator_is_explained() -> None:
    table = README.split("## Operators")[1].split("```")[2]
    assert [name for name in library.operators() if f"`{name}`" not in table] == []


def test_links_and_files_exist() -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", README) + re.findall(r"`((?:examples|csrc|docs)/[\w./]+)`", README)
    assert targets
    assert [target for target in targets if "://" not in target and not (ROOT / target).exists()] == []
