"""Tests the Python code on the pages: it compiles, uses names and arguments that torch_ext has, and runs if it is
marked `run`."""

import math
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import pages
import pytest
import torch
import torch.distributed as dist
from code_checks import missing_names
from pages import ROOT, Code
from pending import PENDING
from torch import Tensor, nn

import torch_ext

PYTHON = {name: [c for c in pages.read(name).codes if c.words[:1] == ("python",)] for name in pages.names()}
RUN = {name: [c for c in codes if "run" in c.words] for name, codes in PYTHON.items()}


def missing_in(name: str, code: Code) -> list[str]:
    try:
        return missing_names(code.text)
    except SyntaxError as error:
        raise AssertionError(f"{name}, line {code.line + (error.lineno or 0)}: {error.msg}") from None


@pytest.mark.parametrize("name", [name for name, codes in PYTHON.items() if codes])
def test_python_is_of_this_package(name: str) -> None:
    missing = {f"{name}:{code.line} {what}" for code in PYTHON[name] for what in missing_in(name, code)}
    assert {each for each in missing if each.split(" ", 1)[1] not in PENDING} == set()
    if missing:
        pytest.skip(f"pending: {', '.join(sorted(missing))}")


def test_what_is_not_there_is_missed() -> None:
    assert missing_names("torch_ext.AdamX(p)\nfrom torch_ext import Foo\ntorch_ext.AdamW(p, stats=1, lr=1)") == [
        "AdamW(stats=)",
        "AdamX",
        "Foo",
    ]


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def given() -> dict[str, Any]:
    """Returns the names that every runnable block may use, as docs/README.md promises."""
    torch.manual_seed(0)

    def loss_of(output: Tensor) -> Tensor:
        return output.float().square().mean()

    return {
        "__name__": "page",
        "torch": torch,
        "dist": dist,
        "nn": nn,
        "torch_ext": torch_ext,
        "model": nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 8)).bfloat16(),
        "batch": torch.randn(32, 256).bfloat16(),
        "loss_of": loss_of,
    }


@pytest.mark.parametrize("name", [name for name, codes in RUN.items() if codes])
def test_code_runs(name: str, process_group: None, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page run one after the other, in one namespace and an empty folder."""
    monkeypatch.chdir(tmp_path)
    namespace, pending, lines = given(), [], pages.read(name).text.splitlines()

    def compared(*values: Any) -> None:
        """Replaces print(): checks that the comment at the end of the calling line begins with the printed text."""
        _, _, said = lines[sys._getframe(1).f_lineno - 1].partition("  # ")
        if said:
            assert said.startswith(" ".join(map(str, values)))

    namespace["print"] = compared
    for code in RUN[name]:
        if missing := missing_in(name, code):
            pending += [f"{name}:{code.line} {', '.join(missing)}"]
            continue
        # Empty lines before the code, so that tracebacks have the page's line numbers.
        exec(compile("\n" * code.line + code.text, str(ROOT / name), "exec"), namespace)
    if pending:
        pytest.skip(f"pending: {'; '.join(pending)}")


def test_the_readme_trains() -> None:
    (code,) = RUN[pages.README]
    namespace: dict[str, Any] = {}
    exec(code.text, namespace)
    assert math.isfinite(namespace["loss"].item())
    assert isinstance(namespace["optimizer"], torch_ext.AdamW)


def test_docs_readme_shows_what_is_given() -> None:
    """The block of docs/README.md that shows these names defines the same as `given`."""
    (code,) = [code for code in PYTHON["docs/README.md"] if "loss_of" in code.text]
    torch.manual_seed(0)
    shown: dict[str, Any] = {}
    exec(code.text, shown)
    assert {name for name in shown if name != "__builtins__"} == {name for name in given() if name != "__name__"}
    assert torch.equal(shown["batch"], given()["batch"])
    assert str(shown["model"]) == str(given()["model"])
