"""Tests what can be tested of tests/gpu.sh without a GPU: it finds its files, runs to its end and counts skips."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import torch
from gpu_machine import ROOT, path_with_processors, pretended, script

import torch_ext

WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: run tests/gpu.sh itself")


def built() -> str:
    return os.path.dirname(torch_ext.library_path())


def moved(to: pathlib.Path) -> pathlib.Path:
    """Copies the tree as it is copied to another machine: without links and build outputs."""
    for folder in ("tests", "torch_ext"):
        shutil.copytree(ROOT / folder, to / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return to


@WITHOUT_GPU
def test_what_was_packed_runs_elsewhere_and_counts(tmp_path: pathlib.Path) -> None:
    """Without a GPU every part is skipped; the skips are counted in the output and in gpu.json."""
    there, out = moved(tmp_path / "there"), tmp_path / "out"
    out.mkdir()
    packed = script("--pack", str(there / ".gpu"), built())
    assert packed.returncode == 0, packed.stdout + packed.stderr
    assert not [path for path in there.rglob("*") if path.is_symlink()]
    ran = script(".gpu", root=there, OUT=str(out), PATH=path_with_processors(16, tmp_path / "bin"))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    *_, last = ran.stdout.splitlines()
    counts = re.fullmatch(r"0 passed, 0 failed, (\d+) skipped", last)
    assert counts is not None and int(counts[1]) > 250
    assert "everything is skipped" in ran.stdout
    for part in ("the benchmark", "the variants", "compute-sanitizer"):
        assert f"skipped: {part}" in ran.stdout
    assert re.search(r"^CUDA library +", ran.stdout, flags=re.MULTILINE)
    report = json.loads((out / "gpu.json").read_text())
    assert (report["passed"], report["failed"], report["skipped"]) == (0, 0, int(counts[1]))
    assert sum(part.get("skipped", 0) for part in report["parts"].values()) == int(counts[1]) - 3


def test_a_pack_has_what_is_built_and_git_does_not_see_it(tmp_path: pathlib.Path) -> None:
    git = shutil.which("git")
    if git is None:
        pytest.skip("there is no git")
    subprocess.run([git, "init", "-q", str(tmp_path)], check=True)
    libraries = tmp_path / "built"
    for name in ("libtorch_ext.so", "cuda/libtorch_ext_cuda.so", "cuda/variants/plain.so"):
        (libraries / name).parent.mkdir(parents=True, exist_ok=True)
        (libraries / name).write_text(name)
    shutil.move(libraries, tmp_path.parent / f"{tmp_path.name}-built")
    for _ in range(2):
        ran = script("--pack", str(tmp_path / "some where"), str(tmp_path.parent / f"{tmp_path.name}-built"))
        assert ran.returncode == 0, ran.stdout + ran.stderr
    found = sorted(str(path.relative_to(tmp_path)) for path in (tmp_path / "some where").rglob("*.so"))
    expected = ["libtorch_ext.so", "libtorch_ext_cuda.so", "variants/plain.so"]
    assert found == [f"some where/{name}" for name in expected]
    status = subprocess.run([git, "-C", str(tmp_path), "status", "--porcelain"], capture_output=True, text=True)
    assert status.stdout == ""
    assert (tmp_path / ".git/info/exclude").read_text().count("/some where/") == 1


def test_a_pack_that_is_too_large_is_refused(tmp_path: pathlib.Path) -> None:
    with open(tmp_path / "libtorch_ext.so", "wb") as file:
        file.write(os.urandom(1 << 20) * 41)
    ran = script("--pack", str(tmp_path / "pack"), str(tmp_path))
    assert ran.returncode == 1 and "at most 40 are legal" in ran.stderr


@pytest.mark.parametrize("switch, runs", [("--exchange", ["test_gpu_exchange.py"]), ("--benchmark", [])])
def test_a_part_runs_alone(switch: str, runs: list[str], tmp_path: pathlib.Path) -> None:
    there = pretended(tmp_path, dict.fromkeys(("exchange", "training"), "def test_a(): pass"))
    ran = script(switch, "built", root=there)
    assert re.findall(r"^torch_ext: tests on the device: (\S+)$", ran.stdout, flags=re.MULTILINE) == runs
    assert ("the benchmark ran" in ran.stdout) == (switch == "--benchmark")
    assert ran.stdout.splitlines()[-1] == "1 passed, 0 failed, 0 skipped"


@pytest.mark.parametrize("arguments, says", [(["--some"], "no switch --some; legal are"), (["a", "b"], "a and b")])
def test_a_command_that_is_not_legal_is_refused(arguments: list[str], says: str) -> None:
    ran = script(*arguments)
    assert ran.returncode == 1 and says in ran.stderr


@WITHOUT_GPU
def test_libraries_of_a_folder_are_used_and_those_alone(tmp_path: pathlib.Path) -> None:
    os.symlink(os.path.realpath(torch_ext.library_path()), tmp_path / "libtorch_ext.so")
    ran = script("--benchmark", str(tmp_path))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.splitlines()[-1] == "0 passed, 0 failed, 1 skipped"
    assert re.search(r"^library +\S+/path/libtorch_ext.so$", ran.stdout, flags=re.MULTILINE)
    assert re.search(r"^CUDA library +none: .*/path", ran.stdout, flags=re.MULTILINE)


def test_a_part_for_which_no_time_is_left_is_skipped_and_named(tmp_path: pathlib.Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'no GPU'\n")
    python.chmod(0o755)
    ran = script(built(), TORCH_EXT_PYTHON=str(python), TORCH_EXT_SECONDS="0")
    files = [file.name for file in (ROOT / "tests/gpu").glob("test_*.py")]
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.splitlines()[-1] == f"0 passed, 0 failed, {len(files) + 3} skipped"
    for file in files:
        assert f"skipped: {file}: no time is left" in ran.stdout


@pytest.mark.parametrize("folder, says", [("/nowhere", "there is no folder /nowhere"), (".", "no libtorch_ext.so in ")])
def test_a_folder_without_the_libraries_is_named(folder: str, says: str, tmp_path: pathlib.Path) -> None:
    ran = script(folder if folder != "." else str(tmp_path))
    assert ran.returncode == 1 and says in ran.stderr


def test_bench_on_a_gpu_says_that_there_is_none() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: python tests/bench --device cuda runs")
    command = [sys.executable, str(ROOT / "tests/bench"), "--device", "cuda"]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 1 and ran.stdout.startswith("bench --device cuda: ")
