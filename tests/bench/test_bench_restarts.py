"""Tests that a part of the benchmark that fails, crashes, hangs or leaves the device dead costs only its own figures.
The device is pretended; the processes and their ends are real."""

import argparse
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch

from bench import cuda_rows, restarts
from bench.figures import Findings
from bench.optimizer_configs import CONFIGURATIONS
from bench.restarts import Patience, Progress, Restarts

# A module with parts (measuring_process.Measured).
PRETENDED = """
import os, pathlib, signal, subprocess, sys, time
from functools import partial
from bench.figures import Bar, Findings
from bench.row import Bench
from bench.timing import Spread

dead = ""

def measured(bench, name):
    bench.findings.times[name] = {"ours": [1.0, 2.0]}
    bench.add("wall", name, Spread(0.9, 0.8, 1.0), Bar(0.85, 0.93), {"pid": float(os.getpid())})

def raises(bench):
    measured(bench, "before it raised")
    raise ValueError("a refusal\\nof two lines")

def kills(bench):
    global dead
    dead = "CUDA error: an illegal memory access was encountered"
    raise RuntimeError(dead + "\\nmore of it")

def kills_unnoticed(bench):
    global dead
    dead = "CUDA error: unspecified launch failure"
    measured(bench, "what was measured before")

def crashes(bench):
    os.write(2, b"what a C library says\\n")
    os.kill(os.getpid(), signal.SIGSEGV)

def hangs(bench):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    pathlib.Path(bench.model[0], "child").write_text(str(child.pid))
    time.sleep(1000)

PARTS = {"raises": raises, "kills": kills, "kills_unnoticed": kills_unnoticed, "crashes": crashes, "hangs": hangs}

def parts(settings):
    return {name: PARTS.get(name.rstrip("0123456789"), partial(measured, name=name)) for name in settings["parts"]}

def bench(settings, findings):
    return Bench(1, [settings["folder"]], 1, 1, [], 0, findings)

def facts(settings):
    if settings.get("no device"):
        raise RuntimeError("there is no device")
    return {"GPU": "pretended"}

def why_dead():
    return dead

def clear():
    assert not dead
"""
PARTS = ["first", "raises", "second", "kills", "third", "kills_unnoticed", "crashes", "fourth", "hangs", "last"]
# Part -> regular expressions of the skip's reason and of the text.
FAILURES = {
    "raises": ("^failed: ValueError: a refusal$", "(?s)^Traceback.*of two lines$"),
    "kills": (
        "^failed: RuntimeError: CUDA error: an illegal memory access was encountered$",
        "(?s)more of it\nafter this part the device is dead: CUDA error: an illegal",
    ),
    "kills_unnoticed": ("^failed: the device is dead$", "^after this part the device is dead: CUDA error: unspec"),
    "crashes": (r"^failed: it ended by signal 11 \(Segm", "(?s)signal 11.*what a C library says.*in crashes"),
    "hangs": ("^failed: it hung: nothing came of it for 4 s$", "(?s)it hung.*in hangs"),
}


@pytest.fixture(autouse=True, scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pathlib.Path]:
    folder = tmp_path_factory.mktemp("module")
    (folder / "pretended_rows.py").write_text(PRETENDED)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield folder


@pytest.fixture(scope="module")
def ran(module: pathlib.Path) -> tuple[Progress, list[int]]:
    """Returns what was found of all parts, and how many figures were known whenever a part ended."""
    known: list[int] = []
    settings = {"parts": PARTS, "folder": str(module)}
    run = Restarts("pretended_rows", settings, lambda now: known.append(len(now.findings.figures)), Patience(60, 4))
    return run.run(), known


def ended(process: float) -> bool:
    """Whether the process has ended, or does so in a few seconds."""
    state, end = pathlib.Path(f"/proc/{process:.0f}/stat"), time.monotonic() + 5
    while time.monotonic() < end:
        try:
            if state.read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


def test_only_the_figures_of_faulty_parts_are_missing(ran: tuple[Progress, list[int]]) -> None:
    found, known = ran
    measured = ["first", "before it raised", "second", "third", "what was measured before", "fourth", "last"]
    assert [figure.what for figure in found.findings.figures] == measured
    assert list(found.findings.times) == measured and found.facts == {"GPU": "pretended"}
    assert known == [1, 2, 3, 3, 4, 5, 5, 6, 6, 7]  # they are told after each part
    figure = found.findings.figures[0]
    assert (figure.row, figure.value, figure.bar) == ("wall", (0.9, 0.8, 1.0), (0.85, 0.93, False))
    assert figure.verdict == "met"


def test_a_process_is_used_until_it_cannot_be(ran: tuple[Progress, list[int]]) -> None:
    found, _ = ran
    processes = [figure.beside["pid"] for figure in found.findings.figures]
    assert found.processes == 5 and len(set(processes)) == 4  # in the third, the first part crashed
    assert processes[0] == processes[1] == processes[2] != processes[3] == processes[4]


@pytest.mark.parametrize("part", FAILURES)
def test_a_faulty_part_is_told_with_its_text(part: str, ran: tuple[Progress, list[int]]) -> None:
    found, _ = ran
    assert list(found.failures) == list(FAILURES)
    why, text = FAILURES[part]
    (skip,) = [skip for skip in found.findings.skips if skip.row == part]
    assert re.search(why, skip.why), skip
    assert re.search(text, found.failures[part].strip()), found.failures[part]


def test_what_a_hanging_part_began_ends_with_it(ran: tuple[Progress, list[int]], module: pathlib.Path) -> None:
    assert ended(int((module / "child").read_text()))


def test_a_process_that_finds_no_device_is_not_begun_again(
    module: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = {"parts": ["a", "b"], "folder": str(module), "no device": True}
    found = Restarts("pretended_rows", settings, lambda now: None).run()
    assert found.processes == 1 and list(found.failures) == ["a", "b"]
    assert "RuntimeError: there is no device" in found.failures["b"]
    assert "no part began: it ended with status 1" in capfd.readouterr().out


def test_what_is_in_the_current_folder_is_not_imported(
    module: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch_ext.py").write_text("raise ImportError('of the current folder')")
    monkeypatch.chdir(tmp_path)
    found = Restarts("pretended_rows", {"parts": ["a"], "folder": str(module)}, lambda now: None).run()
    assert not found.failures


def test_output_is_printed_as_it_comes(module: pathlib.Path, capfd: pytest.CaptureFixture[str]) -> None:
    settings = {"parts": ["a", "crashes", "b"], "folder": str(module)}
    Restarts("pretended_rows", settings, lambda now: None).run()
    said = re.findall("^-- .*|^what a C .*|^crashes: .*", capfd.readouterr().out, flags=re.MULTILINE)
    assert said == [
        "-- a",
        "-- crashes",
        "what a C library says",
        "crashes: it ended by signal 11 (Segmentation fault)",
        "-- b",
    ]


def test_a_long_text_keeps_its_end_and_how_the_process_ended() -> None:
    run = Restarts("pretended_rows", {"parts": [], "folder": ""}, lambda now: None)
    run._fail("a", "it ended by signal 6", "x" * 10_000 + "the end")
    text = run.progress.failures["a"]
    assert text.startswith("it ended by signal 6 ... xx") and text.endswith("the end") and len(text) < 4100


# -- the benchmark on a device ---------------------------------------------------------------------------------------

SETTINGS = {
    "params": None,
    "rounds": None,
    "threads": 1,
    "seed": 0,
    "quick": True,
    "variants": "",
    "rows": list(cuda_rows.ROWS),
}
ON_A_DEVICE = """
import argparse, pathlib, sys
from bench import cuda_rows, restarts
import pretended_rows
cuda_rows.why_not = lambda: ""
class Pretended(restarts.Restarts):
    def __init__(self, module, settings, changed):
        settings = settings | {"parts": sys.argv[2:], "folder": sys.argv[1]}
        super().__init__("pretended_rows", settings, changed)
restarts.Restarts = Pretended
sys.exit(cuda_rows.run(argparse.Namespace(
    params=7, rounds=2, threads=1, seed=0, quick=False, variants=None, rows=[],
    json=pathlib.Path(sys.argv[1]) / "bench.json",
)))
"""


def on_a_device(folder: pathlib.Path, *parts: str) -> "subprocess.Popen[str]":
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", ON_A_DEVICE, str(folder), *parts]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def test_the_benchmark_fails_if_a_part_did_and_says_so_in_json(tmp_path: pathlib.Path) -> None:
    process = on_a_device(tmp_path, "first", "kills", "last")
    said, _ = process.communicate(timeout=100)
    written = json.loads((tmp_path / "bench.json").read_text())
    assert process.returncode == 1 and said.splitlines()[-1].startswith("2 figures: 0 goal, 2 met"), said
    assert [figure["what"] for figure in written["figures"]] == ["first", "last"]
    assert list(written["failures"]) == ["kills"] and written["processes"] == 2
    assert written["machine"] == {"GPU": "pretended"} and written["options"]["params"] == 7


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_a_benchmark_that_is_killed_leaves_its_figures(number: int, tmp_path: pathlib.Path) -> None:
    process = on_a_device(tmp_path, "first", "second", "hangs")
    end = time.monotonic() + 60
    while not (tmp_path / "child").exists() and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(number)
    process.communicate(timeout=60) if number == signal.SIGTERM else process.wait(60)
    written = json.loads((tmp_path / "bench.json").read_text())
    assert [figure["what"] for figure in written["figures"]] == ["first", "second"]
    assert ended(written["figures"][0]["beside"]["pid"])
    child = int((tmp_path / "child").read_text())
    if number == signal.SIGTERM:
        assert ended(child)
    else:
        os.kill(child, signal.SIGKILL)


def test_every_part_has_a_name_and_can_be_named() -> None:
    settings = SETTINGS | {"quick": False}
    names = list(cuda_rows.parts(settings))
    assert names[:4] == [f"wall {name}" for name in CONFIGURATIONS] and len(set(names)) == len(names) == 20
    assert list(cuda_rows.parts(settings | {"rows": ["host", "muon"]})) == [
        *("host fp32", "host bf16", "muon gpt2", "muon llama")
    ]
    assert list(cuda_rows.parts(settings | {"variants": "/v"})) == [f"variants {name}" for name in CONFIGURATIONS]
    assert cuda_rows.bench(settings, Findings()).params == 1_000_000_000
    assert cuda_rows.bench(settings | {"variants": "/v"}, Findings()).params == 1 << 28
    assert cuda_rows.bench(settings | {"quick": True}, Findings()).params == 1 << 20


@pytest.mark.parametrize("part", [name for name in cuda_rows.parts(SETTINGS)])
def test_a_part_for_a_device_runs_on_the_cpu(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part has one figure, of Muon two; that of "launches" is counted by torch's profiler on a device only."""
    monkeypatch.setattr(cuda_rows, "_DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    findings = Findings()
    cuda_rows.parts(SETTINGS)[part](cuda_rows.bench(SETTINGS | {"params": 4096}, findings))
    if "launches" in part:
        assert [skip.why for skip in findings.skips] == ["torch.profiler saw none of ours"] * 2
    elif part == "torch bf16_states" and findings.skips:
        assert "refuses it" in findings.skips[0].why
    elif "peers" in part and findings.skips:
        assert "cannot be imported" in findings.skips[0].why or "its first step failed" in findings.skips[0].why
    else:
        assert len(findings.figures) == (2 if "muon" in part else 1) and not findings.skips
        assert all(figure.row == part.split()[0] and figure.value.median > 0 for figure in findings.figures)


def test_without_a_gpu_nothing_is_measured(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.setattr(restarts, "Restarts", None)
    assert cuda_rows.run(argparse.Namespace(json=tmp_path / "bench.json")) == 1
    assert not list(tmp_path.iterdir())
