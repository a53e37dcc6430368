"""Tests that the README is short, that docs/glossary.md defines the terms that it and the pages of docs/ use, and that
docs/operators.md is complete."""

import re

import c_api
import pages
import pytest
from pages import README

MOST_LINES = 120
SCREEN = 60  # lines of the README's first screen, which is what people read first

# Terms that a user of PyTorch may not know. The singular stands for the plural, too.
TERMS = """
    all-reduce, all-to-all, bit for bit, block scale, bucket, checksum, clip, collective, CUDA graph, dithered, e4m3,
    exp_avg, exp_avg_sq, flat buffer, found_inf, FSDP2, gloo, held-out, loss scale, main gradients, master,
    master weight, mesh, meta device, micro-batch, moments, nat, NCCL, norm, offload, optimizer state, pinned, policy,
    process group, PTX, rank, reduce, reduce-scatter, remainder, replica, resync, rms, shard, stochastic, strategy,
    stream, tied weights, ulp, unshard, version counter, wire, world size, ZeRO, ZeRO-1, ZeRO-2, ZeRO-3
"""
# Words with a digit or a capital letter inside count as terms, too. These are exceptions.
KNOWN = """
    AdamW, BSD-3-Clause, DistributedDataParallel, GPT, GPT-2, PyTorch, README, torch_ext
"""


def listed(text: str) -> list[str]:
    return [term.strip() for term in text.replace("\n", " ").split(",") if term.strip()]


def defined() -> set[str]:
    """Returns the glossary's terms: the bold words at the beginning of its entries, **term, other term**."""
    entries = re.findall(r"^\*\*(.+?)\*\* — ", pages.read("docs/glossary.md").text, flags=re.MULTILINE)
    return {name.lower() for entry in entries for name in entry.split(", ")}


def prose(text: str) -> str:
    """Returns a text without code blocks, inline code, comments and link targets."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->|`[^`\n]*`|\]\([^)]*\)", " ", text, flags=re.DOTALL)
    return text


def used(text: str) -> set[str]:
    """Returns the terms in a text, spelled as in TERMS."""
    text = prose(text)
    spoken = re.sub(r"\s+", " ", text).lower()
    found = {
        term for term in listed(TERMS) if re.search(rf"(?<![\w-]){re.escape(term.lower())}(s|es)?(?![\w-])", spoken)
    }
    words = set(re.findall(r"[A-Za-z][\w-]*", text))
    return found | {w for w in words if re.search(r"^[a-z]+\d|[a-z][A-Z]", w) and w not in listed(KNOWN)}


def undefined(text: str) -> set[str]:
    return {term for term in used(text) if term.lower() not in defined()}


def first_screen() -> str:
    return "\n".join(pages.read(README).text.splitlines()[:SCREEN])


def test_the_readme_is_short() -> None:
    assert len(pages.read(README).text.splitlines()) <= MOST_LINES


def test_the_first_screen_uses_terms() -> None:
    """Makes sure that the next test finds terms to check."""
    assert {"master weight", "optimizer state", "bf16"} <= used(first_screen())


def test_terms_of_the_first_screen_are_defined() -> None:
    assert undefined(first_screen()) == set()


@pytest.mark.parametrize("name", [name for name in pages.names() if name.count("/") == 1 and "diagnose" not in name])
def test_terms_of_a_page_are_defined(name: str) -> None:
    words = {term for term in listed(TERMS) if term in used(pages.read(name).text)}
    assert {term for term in words if term.lower() not in defined()} == set()


@pytest.mark.parametrize("text", ["the ulp of a weight", "a bf17 model", "two ulps"])
def test_a_term_that_is_not_defined_is_found(text: str) -> None:
    assert len(undefined(text)) == 1


def test_both_commands_are_given() -> None:
    commands = [code.text for code in pages.read(README).codes if code.words == ("bash",)]
    assert re.search(r"^bash examples/run\.sh\b.*\n^bash tests/run\.sh\b", "".join(commands), flags=re.MULTILINE)


def test_one_picture_and_one_table() -> None:
    page = pages.read(README)
    assert len(page.tables) == 1
    assert len([link for link in page.links if link.endswith(".png")]) == 1


def test_what_is_cited_is_this_version() -> None:
    (code,) = pages.read("docs/cite.md").codes
    assert f"version = {{{c_api.version()}}}" in code.text


# -- operators ---------------------------------------------------------------------------------------------------------


def test_operators_are_shown_argument_for_argument() -> None:
    (block,) = pages.read("docs/operators.md").blocks_of["schemas"]
    shown = [" ".join(schema.split()) for schema in re.split(r"(?<=-> \(\))\n", block.text) if schema.strip()]
    assert shown == list(c_api.operators().values())


def test_every_operator_is_explained() -> None:
    table = next(t for t in pages.read("docs/operators.md").tables if t.section == "what-each-does")
    explained = {name for first, *_ in table.rows[1:] for name in re.findall(r"`(\w+)`", first)}
    assert explained == set(c_api.operators())
