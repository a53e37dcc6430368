"""What the README says of the library is so, where a test can tell."""

import os
import pathlib
import re

import c_api

ROOT = pathlib.Path(os.path.abspath(__file__)).parents[2]
README = (ROOT / "README.md").read_text()


def test_operators_are_shown_argument_for_argument() -> None:
    block = README.split("## Operators")[1].split("```")[1]
    shown = [" ".join(schema.split()) for schema in re.split(r"(?<=-> \(\))\n", block) if schema.strip()]
    assert shown == list(c_api.operators().values())


def test_every_operator_is_explained() -> None:
    table = README.split("## Operators")[1].split("```")[2]
    assert [name for name in c_api.operators() if f"`{name}`" not in table] == []


def test_links_and_files_exist() -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", README) + re.findall(r"`((?:examples|csrc|docs)/[\w./]+)`", README)
    assert targets
    assert [target for target in targets if "://" not in target and not (ROOT / target).exists()] == []
