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


def script(folder: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(ROOT / "tests/gpu.sh"), folder]
    return subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"TORCH_EXT_PYTHON": sys.executable}, timeout=300
    )


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


@pytest.mark.parametrize("folder, says", [("/nowhere", "there is no folder /nowhere"), (".", "no libtorch_ext.so in ")])
def test_a_folder_without_the_libraries_is_named(folder: str, says: str, tmp_path: pathlib.Path) -> None:
    ran = script(folder if folder != "." else str(tmp_path))
    assert ran.returncode == 1 and says in ran.stderr


def test_bench_on_a_gpu_says_that_there_is_none() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: python -m torch_ext bench --device cuda runs")
    command = [sys.executable, "-m", "torch_ext", "bench", "--device", "cuda"]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 1 and ran.stdout.startswith("bench --device cuda: ")
