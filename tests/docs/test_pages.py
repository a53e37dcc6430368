"""Tests that everything that the pages mention exists: links, anchors, files, commands, settings, messages, names."""

import ast
import contextlib
import functools
import importlib
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable

import pages
import pytest
import torch
from code_checks import missing_names
from pages import README, ROOT, Page
from pending import PENDING

import torch_ext

PAGES = {name: pages.read(name) for name in pages.names()}
each_page = pytest.mark.parametrize("page", [pytest.param(page, id=name) for name, page in PAGES.items()])


def fail_or_skip(found: list[str]) -> None:
    """Fails if something is missing; skips the test if all that is missing is in PENDING. found: "where what", or
    "what"."""
    assert [each for each in found if each.split(" ", 1)[-1] not in PENDING] == []
    if found:
        pytest.skip(f"pending: {', '.join(found)}")


# -- links -------------------------------------------------------------------------------------------------------------


def broken_links(page: Page) -> list[str]:
    """Returns the link targets inside the repository that do not exist."""
    broken = []
    for link in page.links:
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        name = os.path.normpath(os.path.join(os.path.dirname(page.name), path)) if path else page.name
        if not (ROOT / name).exists():
            broken.append(name)
        elif anchor and anchor not in PAGES[name].anchors:
            broken.append(f"{name}#{anchor}")
    return broken


@each_page
def test_links_and_anchors(page: Page) -> None:
    fail_or_skip([f"{page.name} {link}" for link in broken_links(page)])


def test_a_broken_link_is_found() -> None:
    page = Page(
        README, "", links=["docs/nothing.md", "docs/glossary.md#nothing", "docs/glossary.md#glossary", "LICENSE"]
    )
    assert broken_links(page) == ["docs/nothing.md", "docs/glossary.md#nothing"]


def test_every_page_is_linked_from_the_index() -> None:
    """Recipes are linked from the index like any other page, though they are in a folder of their own."""
    linked = {link.split("#")[0] for link in PAGES["docs/README.md"].links}
    mine = {name.removeprefix("docs/") for name in PAGES if name.count("/") == 1 and name != "docs/README.md"}
    assert mine - linked == set()
    recipes = {name.removeprefix("docs/") for name in PAGES if name.startswith("docs/recipes/")}
    assert recipes - linked == set()


@each_page
def test_files_that_are_named_exist(page: Page) -> None:
    spans = [text for _, text in page.spans]
    files = [
        text for text in spans if re.fullmatch(r"(?:bazel|csrc|cuda|docs|examples|tests|torch_ext)/[\w./-]+", text)
    ]
    assert [file for file in files if not (ROOT / file).exists()] == []


# -- commands ----------------------------------------------------------------------------------------------------------


def commands(page: Page) -> list[str]:
    """Returns the commands of a page: in inline code, and the lines of shell blocks."""
    found = [text for _, text in page.spans if re.match(r"(bash|python|bazel) ", text)]
    for code in page.codes:
        if code.words[:1] in (("bash",), ("sh",)):
            found += [line.split("  #")[0].strip() for line in code.text.splitlines() if line.strip()]
    return found


def refused(main: Callable[[list[str]], int], arguments: list[str]) -> str | None:
    """Returns the arguments if a command of this repository rejects them, else None. Runs it with --help added, so that
    it only parses them."""
    if arguments[-1:] == ["--rows"]:  # "--rows ...": any of them
        arguments = arguments[:-1]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(io.StringIO()), pytest.raises(SystemExit) as end:
        main([*arguments, "--help"])
    options = {word for word in arguments if word.startswith("--")}
    known = set(re.findall(r"--[\w-]+", said.getvalue()))
    return None if not end.value.code and options <= known else " ".join(arguments)


def wrong_command(command: str) -> str | None:
    """Returns what is wrong with a command of this repository: a missing file or illegal arguments. None if nothing is,
    or if the command is not of this repository."""
    words = [word for word in shlex.split(command) if word != "..."]
    if words[:3] == ["python", "-m", "torch_ext"]:
        return refused(runpy.run_module("torch_ext")["main"], words[3:])
    if words[0] in ("bash", "python") and words[1:2] == ["-m"]:
        return None
    if words[:2] == ["python", "tests/bench"]:
        return refused(importlib.import_module("bench.__main__").main, words[2:])
    if words[0] == "bazel":
        folders = [label.split(":")[0].removesuffix("/...").strip("/") for label in words if label.startswith("//")]
        return next((folder for folder in folders if not (ROOT / folder / "BUILD").exists()), None)
    if words[0] in ("bash", "python"):
        return None if (ROOT / words[1]).exists() else words[1]
    return None


@each_page
def test_commands_exist(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # where users run them
    fail_or_skip([f"{page.name} {wrong}" for command in commands(page) if (wrong := wrong_command(command))])


@pytest.mark.parametrize(
    "command",
    [
        "python examples/05_nothing.py",
        "bash examples/nothing.sh --quick",
        "python -m torch_ext nothing",
        "python -m torch_ext plan --nothing 1",
        "bazel test //tests/nothing/...",
        "python tests/bench nothing",
        "python tests/bench --rows nothing",
        "python tests/bench comm --rows wall",
    ],
)
def test_a_wrong_command_is_found(command: str) -> None:
    assert wrong_command(command)


# -- settings ----------------------------------------------------------------------------------------------------------


@each_page
def test_settings_are_legal(page: Page) -> None:
    """Inline code like `override_ddp_config={...}` has legal keys and values."""
    for _, text in page.spans:
        found = re.fullmatch(r"(override_(?:optimizer|ddp)_config)=(\{.*\})", text)
        if found and "..." not in text:
            torch_ext.load_policy(torch.bfloat16, **{found[1]: ast.literal_eval(found[2])})


# -- figures -----------------------------------------------------------------------------------------------------------

FIGURES = [
    pytest.param(page, table, id=f"{page.name}:{table.line}")
    for page in (PAGES[README], PAGES["docs/benchmarks.md"])
    for table in page.tables
    if any(re.match(r"[\d.~]+( to | %|,|$)", cell) for row in table.rows[1:] for cell in row)
]


@pytest.mark.parametrize(("page", "table"), FIGURES)
def test_figures_have_a_command(page: Page, table: pages.Table) -> None:
    """Each table of figures has the command that prints them, in the table or in a code block of its section."""
    cells = " ".join(cell for row in table.rows for cell in row)
    blocks = " ".join(code.text for code in page.blocks_of.get(table.section, []))
    assert re.search(r"(bash|python) (tests|examples)/", cells + blocks)


def test_figures_are_found() -> None:
    assert len(FIGURES) > 8


# -- messages ----------------------------------------------------------------------------------------------------------


@functools.cache
def literals() -> list[str]:
    """Returns the string literals of the package, where an f-string is split at its values, and the C library's
    sources, with adjacent literals joined."""
    found = []
    for path in (ROOT / "torch_ext").rglob("*.py"):
        found += [
            node.value
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
    for path in [p for p in (ROOT / "csrc").rglob("*") if p.suffix in (".c", ".def", ".h")]:
        found.append(re.sub(r'"\s*\n?\s*"', "", path.read_text()))
    return found


def is_a_message(part: str) -> bool:
    return any(part in text for text in literals())


def test_messages_are_the_librarys() -> None:
    """The first column of errors.md's tables has parts of messages that occur in the sources."""
    tables = [table for table in PAGES["docs/errors.md"].tables if table.rows[0][0] == "message"]
    parts = [part.strip("`") for table in tables for part, *_ in table.rows[1:]]
    assert len(parts) > 30
    fail_or_skip([f"errors.md message: {part}" for part in parts if not is_a_message(part)])


# -- the API -----------------------------------------------------------------------------------------------------------


def test_every_public_name_is_listed() -> None:
    shown = {text for table in PAGES["docs/api.md"].tables for text in re.findall(r"`(\w+)`", table_text(table))}
    assert set(torch_ext.__all__) - shown == set()
    first = {name for row in PAGES["docs/api.md"].tables[0].rows for name in re.findall(r"`(\w+)`", row[0])}
    fail_or_skip([name for name in sorted(first) if name not in torch_ext.__all__])


def table_text(table: pages.Table) -> str:
    return " ".join(row[0] for row in table.rows)


def test_tables_of_the_main_job_are_made_from_its_results() -> None:
    """docs/benchmarks.md has all tables that `python examples/gpt/tables.py` prints, and README.md has the first
    one."""
    if not (ROOT / "examples/gpt/results.json").exists():
        fail_or_skip(["README.md examples/gpt/results.json"])
    command = [sys.executable, str(ROOT / "examples/gpt/tables.py")]
    printed = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert printed.returncode == 0, printed.stderr
    made = [table.rows for table in pages.parse("printed", printed.stdout).tables]
    shown = [table.rows for table in PAGES["docs/benchmarks.md"].tables if table.section == "the-main-job"]
    assert made and shown == made
    assert PAGES[README].tables[0].rows in made


def other_names_of_the_benchmarks() -> list[str]:
    """Returns the configurations that have another name in tests/bench than on the pages."""
    from bench.optimizer_configs import CONFIGURATIONS

    return sorted(set(CONFIGURATIONS) - {"fp32", "bf16", "bf16_remainder", "8bit"})


def test_benchmarks_have_the_names_of_the_pages() -> None:
    fail_or_skip(["tests/bench names of configurations"] if other_names_of_the_benchmarks() else [])


# -- what is pending ---------------------------------------------------------------------------------------------------


def exists_now(what: str) -> bool:
    """Whether an entry of PENDING exists now."""
    if what == "names of configurations":
        return not other_names_of_the_benchmarks()
    if "/" in what:
        return (ROOT / what).exists()
    if what.startswith("message: "):
        return is_a_message(what.removeprefix("message: "))
    if what.endswith("=)"):
        function, argument = what.removesuffix("=)").split("(")
        return not missing_names(f"torch_ext.{function}({argument}=None)")
    return hasattr(torch_ext, what) or wrong_command(f"python -m torch_ext {what}") is None


def test_nothing_that_has_come_is_pending() -> None:
    assert [what for what in PENDING if exists_now(what)] == [], "take these lines out of tests/docs/pending.py"
