"""Tests the API reference, which is built from the docstrings: it has every public name, its links work, and the
docstrings mention every argument."""

import dataclasses
import html.parser
import inspect
import re
import sys
import warnings
from typing import Any

import pytest
from pages import ROOT

import torch_ext

pdoc = pytest.importorskip("pdoc", reason="pdoc, which builds the API reference, is not installed")
sys.path.insert(0, str(ROOT / "docs"))
import build_reference  # noqa: E402

# Arguments that a docstring need not mention: users do not pass them, or they are described in other words.
NOT_NAMED = {"Policy": {"values", "origins"}, "register_comm_hook": {"ddp"}}


class _Page(html.parser.HTMLParser):
    """The anchors, links and list items of an HTML page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.items = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.items += tag == "li"
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            elif name == "href" and tag == "a" and value:
                self.links.append(value)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> _Page:
    folder = tmp_path_factory.mktemp("reference")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", module="pdoc")  # a name that does not resolve
        build_reference.main([str(folder)])
    return _Page((folder / "torch_ext.html").read_text())


def test_every_public_name_is_in_it(page: _Page) -> None:
    assert set(torch_ext.__all__) - page.anchors == set()
    assert {
        "AdamW.__init__",
        "Adam.step",
        "Adam.consolidate_state_dict",
        "Adam.state_dict",
        "Policy.grad_scaler",
    } <= page.anchors


def test_its_links_lead_somewhere(page: _Page) -> None:
    inside = [link for link in page.links if not re.match(r"https?:", link)]
    assert len(inside) > len(torch_ext.__all__)
    assert [link for link in inside if link.removeprefix("#") not in page.anchors] == []


def test_arguments_are_a_list() -> None:
    docstring = "Does it.\n\nmode: its name.\n    fast (1): quickly,\n        or so\na, b: sizes\nnot: an argument"
    assert build_reference.with_argument_list(docstring, ["mode", "a", "b"]).splitlines() == [
        "Does it.",
        "",
        "",
        "- **mode**: its name.",
        "    - `fast (1)`: quickly,",
        "        or so",
        "- **a, b**: sizes",
        "not: an argument",
    ]


def own_functions(name: str) -> list[tuple[str, Any]]:
    """Returns a public function; or a class and its public methods, without those that a class of torch has as well."""
    public = getattr(torch_ext, name)
    if not inspect.isclass(public):
        return [(name, public)]
    theirs = {m for base in public.__mro__ if base.__module__.split(".")[0] != "torch_ext" for m in vars(base)}
    methods = {m: f for m, f in vars(public).items() if m[:1] != "_" and m not in theirs and inspect.isfunction(f)}
    return [(name, public), *((f"{name}.{m}", f) for m, f in methods.items())]


def documentation_of(what: str, function: Any) -> str:
    """Returns the docstring, and for a dataclass also the names of the documented fields."""
    text = inspect.getdoc(function) or ""
    if dataclasses.is_dataclass(function):
        shown = build_reference.reference().members[what]
        text += "".join(f"\n{v.name}" for v in shown.own_members if isinstance(v, pdoc.doc.Variable) and v.docstring)
    return text


@pytest.mark.parametrize("name", sorted(torch_ext.__all__))
def test_docstrings_speak_of_every_argument(name: str) -> None:
    for what, function in own_functions(name):
        text = documentation_of(what, function)
        assert len(text) > 20, what
        is_exception = inspect.isclass(function) and issubclass(function, BaseException)
        names = set() if is_exception else set(inspect.signature(function).parameters)
        names -= {"self"} | NOT_NAMED.get(what, set())
        assert {argument for argument in names if not re.search(rf"\b{argument}\b", text)} == set(), what
