"""tests/gpu.sh, as far as a machine without a GPU can tell: it finds everything, runs to its end and counts."""

import os
import pathlib
import re
import subprocess
import sys

import pytest
import torch

import torch_ext

ROOT = pathlib.Path(__file__).parent.parent.parent


def script(folder: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(ROOT / "tests/gpu.sh"), folder]
    given = os.environ | {"TORCH_EXT_PYTHON": sys.executable} | environment
    return subprocess.run(command, capture_output=True, text=True, env=given, timeout=300)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: run tests/gpu.sh itself")
def test_without_a_gpu_everything_is_skipped_and_counted() -> None:
    ran = script(os.path.dirname(torch_ext.library_path()))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    *_, last = ran.stdout.splitlines()
    counts = re.fullmatch(r"0 passed, 0 failed, (\d+) skipped", last)
    assert counts is not None and int(counts[1]) > 200
    assert "everything is skipped" in ran.stdout
    for part in ("the benchmark", "compute-sanitizer"):
        assert f"skipped: {part}" in ran.stdout
    assert re.search(r"^CUDA library +", ran.stdout, flags=re.MULTILINE)


# Python, but for pytest: one file's process crashes, the others have a test that passes, one that fails and one
# skipped.
CRASHES = r"""#!/bin/bash
case "$*" in
*pytest*test_gpu_graphs.py*) kill -SEGV $$ ;;
*pytest*)
  for word in "$@"; do case $word in --junitxml=*) xml=${word#*=} ;; esac done
  echo '<a><testsuite tests="3" failures="1" errors="0" skipped="1"/></a>' >"$xml"
  exit 1 ;;
*"import torch"*) echo "none" ;;
*) exec PYTHON "$@" ;;
esac
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: run tests/gpu.sh itself")
def test_a_file_that_crashes_is_counted_and_the_others_run(tmp_path: pathlib.Path) -> None:
    """With the libraries of a folder, and those alone."""
    os.symlink(os.path.realpath(torch_ext.library_path()), tmp_path / "libtorch_ext.so")
    python = tmp_path / "python"
    python.write_text(CRASHES.replace("PYTHON", sys.executable))
    python.chmod(0o755)
    ran = script(str(tmp_path), TORCH_EXT_PYTHON=str(python))
    files = len(list((ROOT / "tests/gpu").glob("test_*.py")))
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert ran.stdout.splitlines()[-1] == f"{files - 1} passed, {files} failed, {files + 1} skipped"
    assert "test_gpu_graphs.py ended with status 139 and failed" in ran.stdout
    assert re.search(r"^library +\S+/path/libtorch_ext.so$", ran.stdout, flags=re.MULTILINE)
    assert re.search(r"^CUDA library +none: .*/path", ran.stdout, flags=re.MULTILINE)


def test_a_part_for_which_no_time_is_left_is_skipped_and_named(tmp_path: pathlib.Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'no GPU'\n")
    python.chmod(0o755)
    ran = script(os.path.dirname(torch_ext.library_path()), TORCH_EXT_PYTHON=str(python), TORCH_EXT_SECONDS="0")
    files = [file.name for file in (ROOT / "tests/gpu").glob("test_*.py")]
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.splitlines()[-1] == f"0 passed, 0 failed, {len(files) + 2} skipped"
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
