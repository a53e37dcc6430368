"""Parses the README and the pages of docs/ for the tests of this folder: headings, links, code, tables."""

import os
import pathlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

pytest.importorskip("markdown_it", reason="markdown-it-py, which reads the pages, is not installed")
from markdown_it import MarkdownIt  # noqa: E402
from markdown_it.token import Token  # noqa: E402

ROOT = pathlib.Path(os.path.abspath(__file__)).parents[2]
README = "README.md"

_MARKDOWN = MarkdownIt("commonmark").enable("table")


@dataclass(frozen=True)
class Code:
    """A fenced code block. `words` are the words after its backticks ("python run")."""

    line: int
    words: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class Table:
    """A table: its rows without the row of dashes. Each cell is Markdown."""

    line: int
    section: str
    rows: list[list[str]]


@dataclass
class Page:
    """A page. `name` is its path from the repository's root."""

    name: str
    text: str
    anchors: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    codes: list[Code] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    spans: list[tuple[str, str]] = field(default_factory=list)
    """Inline code: (its section's anchor, its text)."""
    blocks_of: dict[str, list[Code]] = field(default_factory=dict)
    """Anchor of a section -> its fenced code blocks."""


def names() -> list[str]:
    """Returns README.md and every page below docs/."""
    return [README, *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]


def anchor_of(heading: str) -> str:
    """Returns the anchor that GitHub and GitLab derive from a heading's text."""
    return re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).strip().replace(" ", "-")


def read(name: str) -> Page:
    return parse(name, (ROOT / name).read_text())


def parse(name: str, text: str) -> Page:
    """Returns the page with this path and text."""
    page = Page(name, text)
    section = ""
    tokens = iter(_MARKDOWN.parse(page.text))
    for token in tokens:
        if token.type == "heading_open":
            section = anchor_of(_inline(page, section, next(tokens)))
            page.anchors.append(section)
        elif token.type == "inline":
            _inline(page, section, token)
        elif token.type == "fence":
            code = Code(_line(token), tuple(token.info.split()), token.content)
            page.codes.append(code)
            page.blocks_of.setdefault(section, []).append(code)
        elif token.type == "table_open":
            page.tables.append(Table(_line(token), section, list(_rows(page, section, tokens))))
    return page


def _line(token: Token) -> int:
    assert token.map is not None
    return token.map[0] + 1


def _rows(page: Page, section: str, tokens: Iterator[Token]) -> Iterator[list[str]]:
    row: list[str] = []
    for token in tokens:
        if token.type == "inline":
            _inline(page, section, token)
            row.append(token.content)
        elif token.type == "tr_close":
            yield row
            row = []
        elif token.type == "table_close":
            return


def _inline(page: Page, section: str, token: Token) -> str:
    """Adds the links and inline code of a token to the page. Returns the token's visible text."""
    for child in token.children or []:
        if child.type == "link_open":
            page.links.append(str(child.attrs["href"]))
        elif child.type == "image":
            page.links.append(str(child.attrs["src"]))
        elif child.type == "code_inline":
            page.spans.append((section, child.content))
    return "".join(child.content for child in token.children or [] if child.type in ("text", "code_inline"))
