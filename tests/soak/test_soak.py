"""A small, seeded part of the soak must find nothing. `bash tests/soak.sh SECONDS` runs more."""

import functools
import pathlib
import re
import shutil
import subprocess
import sys
from typing import NamedTuple

import pytest
from soak import forked
from soak.outcome import Outcome, Tally

import torch_ext

# By part: the kinds, and the number of runs of each.
PARTS = {
    "faults of ranks": (
        ["kill", "stop", "pause", "interrupt", "interrupt_all", "forward", "backward", "hook", "alone", "everywhere"],
        2,
    ),
    "faults of saves, and of weights that travel": (
        [
            "kill_file",
            "kill_background",
            "kill_folder",
            "kill_async",
            "flip_file",
            "flip_folder",
            "disk_full",
            "two_jobs",
            "kill_publish",
            "kill_apply",
            "flip_delta",
            "kill_weights",
            "flip_weights",
            "fill_weights",
        ],
        3,
    ),
    "programs of ranks": (["program"], 10),
    "programs of one process": (["step_program"], 30),
}


FULL_DISKS = ["disk_full", "fill_weights"]

# Cases that once failed and were fixed, by what was wrong.
FOUND = {
    "rank 0 fails like the others and ends, and with it the store in which they look for each other": "alone:1000005",
    "a file whose directory says that its records begin before it": "flip_file:11000171",
}


class Mutant(NamedTuple):
    """A bug for the soak to find: in `file` of the package, `old` is replaced by `new`."""

    file: str
    old: str
    new: str


# By kinds: a bug that each of these kinds must find.
MUTANTS = {
    ("kill_file", "kill_background"): Mutant(
        "checkpoint/files.py",
        "file = _begin(folder, _unfinished_prefix(folder, name), former)",
        "file = _begin(folder, _unfinished_prefix(folder, name), former) if former is None else NewFile(path, None)",
    ),
    ("kill_folder", "kill_async"): Mutant(
        "checkpoint/folder.py", "not in alive and not current(name)]", "not in alive]"
    ),
    ("flip_file",): Mutant("checkpoint/archive.py", "return archive.testzip()", "return None"),
    ("flip_folder",): Mutant("checkpoint/folder_items.py", "if left or crc != wanted:", "if left:"),
    ("disk_full",): Mutant(
        "checkpoint/new_file.py", "if not isinstance(error, OSError) or error.errno not in _FULL:", "if True:"
    ),
    ("two_jobs",): Mutant(
        "checkpoint/files.py",
        "except BlockingIOError:\n            return",
        "except BlockingIOError:\n            pass",
    ),
    ("kill_weights",): Mutant("checkpoint/incremental.py", "full = own.newest_full()", "full = max(own.files)[0]"),
    # Deltas are saved after a version that does not exist.
    ("fill_weights",): Mutant(
        "checkpoint/incremental.py", "if own is not None and (version - 1, part) in own.files", "if own"
    ),
    ("flip_weights",): Mutant("checkpoint/load_weights.py", 'ValueError(f"{path}: {error}")', "ValueError(str(error))"),
    # Every chain of deltas gets the same name.
    ("kill_publish",): Mutant("weight_sync/trainer_ranks.py", "os.urandom(16)", "bytes(range(16))"),
    # Weights are zero for a while during apply.
    ("kill_apply",): Mutant(
        "weight_sync/subscriber.py",
        "        self._tensors.refuse_changed()\n",
        "        self._tensors.refuse_changed()\n"
        "        kept = {name: t.clone() for name, t in self._tensors.named.items()}\n"
        "        for t in self._tensors.named.values():\n"
        "            t.zero_()\n"
        "        __import__('time').sleep(0.003)\n"
        "        for name, t in self._tensors.named.items():\n"
        "            t.copy_(kept[name])\n",
    ),
    ("flip_delta",): Mutant(
        "weight_sync/subscriber.py",
        "with delta_library.messages(list(parts)) as messages,",
        "with __import__('contextlib').suppress(ValueError), delta_library.messages(list(parts)) as messages,",
    ),
}


def run(*options: str, package: str = "") -> "subprocess.CompletedProcess[str]":
    """Runs the soak in a process of its own, since ranks are forked from a process without threads.

    package: a folder with another torch_ext."""
    return forked.run(["--seconds", "240", *options], package)


@functools.cache
def soak(*options: str) -> str:
    """Returns what the soak printed; an assertion fails if it found something."""
    found = run(*options)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


def part(name: str) -> str:
    kinds, runs = PARTS[name]
    return soak("--seed", "3", "--runs", str(runs), "--kinds", *kinds)


def faultless(printed: str) -> list[str]:
    """Returns the kinds with runs in which nothing was found."""
    return re.findall(r"^(\w+) +\d+ runs: 0 hung, 0 silent, 0 unnamed, 0 crashed", printed, re.M)


def skipped(printed: str) -> dict[str, str]:
    """Returns the kinds of which runs were skipped, and why."""
    return dict(re.findall(r"^(\w+) +\d+ SKIPPED: (.+)$", printed, re.M))


@pytest.mark.parametrize("name", PARTS)
def test_a_part_of_the_soak(name: str) -> None:
    printed = part(name)
    assert faultless(printed) == PARTS[name][0]
    assert skipped(printed).keys() <= set(FULL_DISKS)


def test_the_command() -> None:
    command = [sys.executable, str(pathlib.Path(__file__).parent), "--runs", "1", "--kinds", "flip_file"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and faultless(done.stdout) == ["flip_file"], done.stdout + done.stderr


@pytest.mark.parametrize("kind", FULL_DISKS)
def test_disks_were_full(kind: str) -> None:
    """Skips if no tmpfs may be mounted here. Skips are counted, so this does not pass unnoticed."""
    if reason := skipped(part("faults of saves, and of weights that travel")).get(kind):
        pytest.skip(f"the soak's full disks: {reason}")


def test_what_is_left_out_is_said_and_counted() -> None:
    tally = Tally("disk_full", "saves to a small tmpfs")
    for outcome in (Outcome(skipped="no tmpfs"), Outcome(), Outcome(skipped="no tmpfs"), Outcome(silent=["x"])):
        tally.add(outcome)
    printed = str(tally)
    assert skipped(printed) == {"disk_full": "no tmpfs"} and "2 SKIPPED" in printed
    assert "2 runs: 0 hung, 1 silent" in printed and tally.failed


@pytest.mark.parametrize("what", FOUND)
def test_what_was_found_stays_mended(what: str) -> None:
    assert faultless(soak("--replay", FOUND[what], "--runs", "2")) == [FOUND[what].split(":")[0]]


@pytest.mark.parametrize("kinds", MUTANTS, ids="-".join)
def test_each_kind_finds_the_bug_that_is_put_in(kinds: tuple[str, ...], tmp_path: pathlib.Path) -> None:
    mutant, package = MUTANTS[kinds], pathlib.Path(torch_ext.__file__).parent
    shutil.copytree(package, tmp_path / "torch_ext", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "libtorch_ext.so").symlink_to(torch_ext.library_path())
    file = tmp_path / "torch_ext" / mutant.file
    text = file.read_text()
    assert text.count(mutant.old) == 1, f"{mutant.file} has the mutant's line no more: follow the change"
    file.write_text(text.replace(mutant.old, mutant.new))
    for kind in kinds:
        options = ("--seed", "5", "--runs", "24", "--kinds", kind, "--until-found")
        printed = run(*options, package=str(tmp_path)).stdout
        if not skipped(printed):
            assert re.search(rf"^{kind} .* runs: ", printed, re.M) and faultless(printed) == [], printed
            assert printed.count("python tests/soak --replay") == 1, "the first that is found is the last"
