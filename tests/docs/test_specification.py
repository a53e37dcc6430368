"""Tests that docs/specification.md and the tests agree: every code (D3) in the name of a test or case, or after a
mention of the page, is a statement there, and every statement is in the name of a test or case."""

import collections
import re

import pages
import pytest
from pages import ROOT

SPECIFICATION = "docs/specification.md"
FOLDERS = ("csrc", "cuda", "examples", "tests", "torch_ext")
SUFFIXES = {".c", ".cc", ".cu", ".def", ".h", ".inc", ".py"}

CODE = r"[A-G]\d{1,2}"
# Where names have codes: in Python test_D3_D7_a_write; in GoogleTest TEST_P(DtypeKeyTest, C3_C4) and
# INSTANTIATE_TEST_SUITE_P(A3_A4_overrides, ...); the id of a case is "E5-zeroed" or "A2_bf16_flag".
NAMES = [
    re.compile(r"\bdef test_((?:[A-Ga-g]\d{1,2}_)+)"),
    re.compile(rf"\bTEST(?:_F|_P)?\(\w+,\s*((?:{CODE}[_)])+)"),
    re.compile(rf"\bINSTANTIATE_TEST_SUITE_P\(((?:{CODE}[_,])+)"),
    re.compile(rf'"((?:{CODE}[_-])+)'),
]
MENTION = re.compile(r"specification\.md,\s+([^):.]+)")


def statements(text: str) -> list[str]:
    """Returns the codes of the page's statements, in its order."""
    return re.findall(rf"^\*\*({CODE})\*\* ", text, flags=re.MULTILINE)


def in_names(text: str) -> set[str]:
    """Returns the codes in the names of a source's tests and cases."""
    found = [match for pattern in NAMES for match in pattern.findall(text)]
    return {code for name in found for code in re.findall(CODE, name.upper())}


def in_mentions(text: str) -> set[str]:
    """Returns the codes that follow the page's name in a source: those of statements, and of whole groups (C)."""
    return {code for part in MENTION.findall(text) for code in re.findall(r"\b[A-G](?:\d{1,2})?\b", part)}


def sources() -> dict[str, str]:
    """Returns path -> text of every source except this file."""
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    return {str(path.relative_to(ROOT)): path.read_text() for path in files if path.name != "test_specification.py"}


def undefined(text: str, defined: list[str]) -> set[str]:
    """Returns the codes in a source that are neither statements nor groups."""
    return (in_names(text) | in_mentions(text)) - set(defined) - {code[0] for code in defined}


DEFINED = statements(pages.read(SPECIFICATION).text)
SOURCES = sources()


def test_statements_are_numbered() -> None:
    """Groups are A to G, and the statements of each are numbered from 1 without a gap."""
    counts = collections.Counter(code[0] for code in DEFINED)
    assert [code for group in "ABCDEFG" for code in [f"{group}{i + 1}" for i in range(counts[group])]] == DEFINED
    headings = re.findall(r"^## ([A-G])\. ", pages.read(SPECIFICATION).text, flags=re.MULTILINE)
    assert headings == list(counts) == list("ABCDEFG")


def test_every_code_is_a_statement() -> None:
    assert {name: codes for name, text in SOURCES.items() if (codes := undefined(text, DEFINED))} == {}


def test_every_statement_is_shown_by_a_test() -> None:
    cited = set().union(*(in_names(text) for name, text in SOURCES.items() if name.startswith("tests/")))
    assert [code for code in DEFINED if code not in cited] == []


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        ("def test_g5_to_and_from_torch() -> None:", {"G5"}),
        ("def test_D1_D2_D12_weights() -> None:", {"D1", "D2", "D12"}),
        ("def test_fp32_steps() -> None:", set()),
        ("TEST_P(DtypeKeyTest, C3_C4) {", {"C3", "C4"}),
        ("TEST(Adamw,\n     G2_G3_Skips) {", {"G2", "G3"}),
        ("TEST(SmallFloat, E4m3OnEveryPattern) {", set()),
        ("INSTANTIATE_TEST_SUITE_P(A5_hooks, PolicyTest, values);", {"A5"}),
        ('pytest.param("one", id="E4-one microbatch"),', {"E4"}),
        ('{"E1_A6_gradients_None_and_bucket", ""},', {"E1", "A6"}),
    ],
)
def test_codes_are_found_in_names(text: str, codes: set[str]) -> None:
    assert in_names(text) == codes


def test_what_is_not_defined_is_found() -> None:
    source = "# docs/specification.md, D3 and D9: a write. A1 here is no code.\ndef test_e12_nothing(): ...\n"
    assert undefined(source, ["D3", "E1"]) == {"D9", "E12"}
    assert in_mentions("(docs/specification.md, C)") == {"C"}
