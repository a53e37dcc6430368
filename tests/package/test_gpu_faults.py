"""Tests tests/gpu.sh with tests that crash, hang or kill the device: only the faulty test fails, and the report says
why. The device is a fake (gpu_machine.py); the processes and their faults are real."""

import importlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
from gpu_machine import ROOT, path_with_processors, pretended, script

KILLS = """
import pytest, torch
def test_before(): torch.cuda.synchronize()
def test_kills():
    torch.cuda.dead = True
    torch.cuda.synchronize()
def test_between(): torch.cuda.synchronize()
def test_kills_and_does_not_wait(): torch.cuda.dead = True
@pytest.mark.skip(reason="of its own")
def test_is_skipped(): pass
def test_after(): torch.cuda.synchronize()
"""
CRASHES = """
import os, signal
def test_before(): pass
def test_crashes():
    os.write(2, b"what a C library says\\n")
    os.kill(os.getpid(), signal.SIGSEGV)
def test_ends_the_process(): os._exit(0)
def test_after(): pass
"""
HANGS = """
import pathlib, subprocess, sys
def test_hangs():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    pathlib.Path(FOLDER, "child").write_text(str(child.pid))
    child.wait()
def test_after(): pass
"""
FAILS = """
import pytest
@pytest.fixture
def torn_down():
    yield
    raise OSError("in its teardown")
def test_fails(): assert 1 + 1 == 3
def test_passes_and_fails(torn_down): pass
@pytest.mark.parametrize("i", range(3))
def test_skips(i): pytest.skip("one GPU" if i else "no NCCL")
@pytest.mark.xfail
def test_is_expected_to_fail(): assert False
def test_after(): pass
"""
AT_EXIT = """
import atexit, os, signal
def test_passes(): atexit.register(os.kill, os.getpid(), signal.SIGKILL)
"""
ALL_KILL = """
import pytest, torch
@pytest.mark.parametrize("i", range(7))
def test_kills(i): torch.cuda.dead = True
"""
FAULTS = {
    "all_kill": ALL_KILL,
    "at_exit": AT_EXIT,
    "crashes": CRASHES,
    "fails": FAILS,
    "hangs": HANGS,
    "imports": "import nothing_of_this_name\ndef test_a(): pass",
    "kills": KILLS,
}
# Test file -> passed, failed, skipped, how often a new process continued it.
COUNTS = {
    "all_kill": (0, 5, 2, 4),
    "at_exit": (1, 1, 0, 0),
    "crashes": (2, 2, 0, 2),
    "fails": (1, 2, 4, 0),
    "hangs": (1, 1, 0, 1),
    "imports": (0, 1, 0, 0),
    "kills": (3, 2, 1, 2),
}
# Test file, name in gpu.json, regular expression of the text there.
TEXTS = [
    ("at_exit", "test_gpu_at_exit.py", "after its last test: it ended by signal 9"),
    ("crashes", "test_crashes", r"it ended by signal 11(?s:.*)what a C library says(?s:.*)in test_crashes"),
    ("crashes", "test_ends_the_process", "it ended with status 0"),
    ("fails", "test_fails", r"assert \(1 \+ 1\) == 3"),
    ("fails", "test_passes_and_fails", "OSError: in its teardown"),
    ("hangs", "test_hangs", "it hung: nothing came of it for 5 s(?s:.*)in test_hangs"),
    ("imports", "test_gpu_imports.py", "before its tests(?s:.*)No module named 'nothing_of_this_name'"),
    (
        "kills",
        "test_kills",
        "torch.py:13: RuntimeError\nafter this test the device is dead: CUDA error: an illegal memory",
    ),
    ("kills", "test_kills_and_does_not_wait", "^after this test the device is dead: CUDA error: an illegal"),
]
# Test file -> why each of its processes but the last ended.
ENDS = {
    "crashes": ["test_crashes: it ended by signal 11", "test_ends_the_process: it ended with status 0"],
    "hangs": ["test_hangs: it hung"],
    "kills": ["after .*test_kills the device is dead: CUDA", "after .*test_kills_and_does_not_wait the device is dead"],
}


class Ran:
    """One run of tests/gpu.sh in a tree of gpu_machine.pretended: its status, its output and its report gpu.json."""

    def __init__(self, there: pathlib.Path, *arguments: str, processors: int = 16, **environment: str) -> None:
        path = path_with_processors(processors, there / "bin")
        command = [*arguments, "--json", str(there / "gpu.json"), str(there / "built")]
        ran = script(*command, root=there, **{"PATH": path, "TORCH_EXT_TEST_SECONDS": "5", **environment})
        self.status, self.text, self.there = ran.returncode, ran.stdout + ran.stderr, there
        *_, self.last = ran.stdout.splitlines()
        self.parts = json.loads((there / "gpu.json").read_text())["parts"]

    def part(self, name: str) -> Any:
        return self.parts[f"test_gpu_{name}.py"]

    def failures(self, name: str) -> dict[str, str]:
        found: dict[str, str] = self.part(name)["failures"]
        return found


def is_over(process: int) -> bool:
    """Whether a process has ended."""
    state = pathlib.Path(f"/proc/{process}/stat")
    return not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    there = tmp_path_factory.mktemp("there")
    tests = {name: text.replace("FOLDER", repr(str(there))) for name, text in FAULTS.items()}
    return Ran(pretended(there, tests), "--tests", "--benchmark")


@pytest.mark.parametrize("name", COUNTS)
def test_each_test_is_counted_once(name: str, ran: Ran) -> None:
    found = ran.part(name)
    assert tuple(found[key] for key in ("passed", "failed", "skipped", "begun again")) == COUNTS[name], ran.text
    assert len(found["failures"]) == found["failed"]
    assert sum(found["skipped, by reason"].values()) == found["skipped"]
    assert found["seconds"] > 0 and len(found["processes"]) == found["begun again"] + 1


def test_the_last_line_is_the_sum_and_the_status_says_that_some_failed(ran: Ran) -> None:
    passed, failed, skipped, _ = map(sum, zip(*COUNTS.values(), strict=True))
    assert ran.last == f"{passed + 1} passed, {failed} failed, {skipped} skipped", ran.text  # and the benchmark
    assert ran.status == 1 and "the benchmark ran" in ran.text


@pytest.mark.parametrize("name, test, says", TEXTS)
def test_a_failure_has_its_text(name: str, test: str, says: str, ran: Ran) -> None:
    assert re.search(says, ran.failures(name)[test], flags=re.MULTILINE), ran.failures(name)


@pytest.mark.parametrize("name", ENDS)
def test_why_a_file_was_begun_again_is_said(name: str, ran: Ran) -> None:
    *found, last = [process["why"] for process in ran.part(name)["processes"]]
    assert last == "" and len(found) == len(ENDS[name])
    for why, says in zip(found, ENDS[name], strict=True):
        assert re.search(says, why) and why in ran.text


def test_the_calls_of_pytest_are_not_told(ran: Ran) -> None:
    """A failure's text leaves out pytest's forty stack frames, so that there is room for the output of C libraries."""
    assert "_pytest" in ran.text
    assert not re.search(
        "_pytest|pluggy", ran.failures("crashes")["test_crashes"] + ran.failures("hangs")["test_hangs"]
    )


def test_skips_are_told_by_reason(ran: Ran) -> None:
    reasons = ran.part("fails")["skipped, by reason"]
    assert reasons["one GPU"] == 2 and reasons["no NCCL"] == 1
    assert ran.part("kills")["skipped, by reason"] == {"of its own": 1}
    assert ran.part("all_kill")["skipped, by reason"] == {
        "not begun: no test passed in 5 processes, one after the other": 2
    }


def test_what_a_test_began_ends_with_it(ran: Ran) -> None:
    assert is_over(int((ran.there / "child").read_text()))


def test_each_log_comes_whole(ran: Ran) -> None:
    """The output of each test file is printed once, below the file's name."""
    for name in FAULTS:
        assert len(re.findall(rf"^torch_ext: tests on the device: test_gpu_{name}.py$", ran.text, re.MULTILINE)) == 1
    text = ran.text.partition("tests on the device: test_gpu_crashes.py\n")[2]
    assert "what a C library says" in text.partition("torch_ext: tests on")[0]


MEETS = """
import pathlib, time
def test_meets():
    with open(MARKS, "a") as marks: print("NAME begins", file=marks)
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and pathlib.Path(MARKS).read_text().count("begins") < 2: time.sleep(0.05)
    with open(MARKS, "a") as marks: print("NAME ends", file=marks)
"""


@pytest.mark.parametrize("processors, patience, order", [(4, 10, "bbee"), (3, 2, "bebe")])
def test_files_run_side_by_side_where_there_are_processors(
    processors: int, patience: int, order: str, tmp_path: pathlib.Path
) -> None:
    marks = tmp_path / "marks"
    text = MEETS.replace("MARKS", repr(str(marks))).replace("PATIENCE", str(patience))
    tests = {name: text.replace("NAME", name) for name in ("exchange", "training")}
    ran = Ran(pretended(tmp_path / "there", tests), "--tests", "--exchange", processors=processors)
    assert ran.last == "2 passed, 0 failed, 0 skipped", ran.text
    assert "".join(line.split()[1][0] for line in marks.read_text().splitlines()) == order


TAKES_LONG = """
import time
def test_before(): pass
def test_takes_long():
    for _ in range(100): time.sleep(1)
def test_after(): pass
"""


def test_what_is_known_is_on_disk_when_all_is_killed(tmp_path: pathlib.Path) -> None:
    pid = tmp_path / "pid"
    notes = f"import os, pathlib\npathlib.Path({str(pid)!r}).write_text(str(os.getpid()))\n"
    there = pretended(tmp_path / "there", {"exchange": notes + TAKES_LONG, "training": FAILS})
    command = ["bash", str(there / "tests/gpu.sh"), "--json", str(there / "gpu.json"), str(there / "built")]
    given = os.environ | {"PATH": path_with_processors(16, there / "bin"), "TORCH_EXT_PYTHON": sys.executable}
    with open(tmp_path / "log", "wb") as log:
        process = subprocess.Popen(command, env=given, stdout=log, stderr=log, cwd=there, start_new_session=True)
    end, found = time.monotonic() + 60, {"passed": 0, "failed": 0}
    while time.monotonic() < end and (found["passed"], found["failed"]) != (2, 2):
        time.sleep(0.1)
        if (there / "gpu.json").exists():
            found = json.loads((there / "gpu.json").read_text())
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert (found["passed"], found["failed"], found["skipped"]) == (2, 2, 4), (tmp_path / "log").read_text()
    end = time.monotonic() + 5
    while time.monotonic() < end and not is_over(int(pid.read_text())):
        time.sleep(0.05)
    assert is_over(int(pid.read_text())), "the process of the tests keeps the device"
    assert "OSError: in its teardown" in found["parts"]["test_gpu_training.py"]["failures"]["test_passes_and_fails"]


def test_tests_leave_time_for_the_parts_after_them(tmp_path: pathlib.Path) -> None:
    there = pretended(tmp_path / "there", {"training": TAKES_LONG})
    ran = Ran(there, "--tests", "--benchmark", TORCH_EXT_SECONDS="18", TORCH_EXT_TEST_SECONDS="60")
    assert ran.last == "2 passed, 1 failed, 1 skipped" and "the benchmark ran" in ran.text, ran.text
    assert list(ran.failures("training")) == ["test_takes_long"]
    assert "its time was up" in ran.failures("training")["test_takes_long"]
    assert ran.part("training")["skipped, by reason"] == {"no time is left": 1}


@pytest.mark.parametrize("fault, says", [("import os; os.abort()", "it ended by signal 6"), ("x = 1", "status 5")])
def test_a_file_without_a_test_is_a_failure(fault: str, says: str, tmp_path: pathlib.Path) -> None:
    ran = Ran(pretended(tmp_path / "there", {"exchange": fault, "training": ""}), "--exchange")
    assert ran.last == "0 passed, 1 failed, 0 skipped", ran.text
    assert f"before its tests: {says}" in ran.failures("exchange")["test_gpu_exchange.py"].replace("it ended with ", "")


def test_a_runner_that_fails_is_counted(tmp_path: pathlib.Path) -> None:
    there = pretended(tmp_path / "there", {"training": "def test_a(): pass"})
    (there / "tests/gpu_files.py").write_text("raise SystemExit(3)")
    ran = Ran(there, "--tests")
    assert ran.status == 1 and ran.last == "0 passed, 1 failed, 0 skipped", ran.text
    assert os.listdir(there / "built") == ["libtorch_ext.so"]


def test_a_process_beside_the_test_that_hangs_is_told_with_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tests/gpu")
    run = importlib.import_module("other_process").run
    status, text = run("import sys, time\nprint('before', sys.argv[1], flush=True)\ntime.sleep(100)", 7, seconds=3.0)
    assert status == -signal.SIGABRT
    assert re.search(r"(?s)^before 7\n.*File .*line 3 in <module>.*it was ended after 3 s$", text.strip()), text
    assert run("import os; raise SystemExit(os.environ['SAYS'])", SAYS="why") == (1, "why\n")
