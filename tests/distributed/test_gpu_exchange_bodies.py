"""Runs tests/gpu/test_gpu_exchange.py without a GPU: over gloo, and over a pretended NCCL in host memory. Only what a
late device would show is not tested here."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import torch

import torch_ext

TESTS = pathlib.Path(os.path.abspath(__file__)).parents[1]
FILE = TESTS / "gpu/test_gpu_exchange.py"

# Two trainings of each strategy and transport, and all other tests except for processes that end in special ways.
CHOSEN = "bf16-main-fp32 or of_their_own or changes_nothing or memory_of or under_way or just_ends or hangs or missing"


@pytest.fixture(scope="module")
def nccl(tmp_path_factory: pytest.TempPathFactory) -> str:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler to build the pretended NCCL with")
    path = tmp_path_factory.mktemp("nccl") / "libnccl.so"
    source = TESTS / "core/fake_nccl.cc"
    subprocess.run([compiler, "-std=c++20", "-fPIC", "-shared", "-o", path, source], check=True)
    return str(path)


def test_the_bodies_pass_without_a_gpu(nccl: str) -> None:
    folders = [*sys.path, *(str(TESTS / name) for name in ("gpu", "distributed", "torch", "")), os.getcwd()]
    package = os.path.dirname(os.path.dirname(os.path.abspath(torch_ext.__file__)))
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([package, *filter(None, folders)]),
        "TORCH_EXT_GPU_TESTS_DEVICE": "cpu",
        "TORCH_EXT_NCCL": nccl,
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null"]
    command += ["--rootdir", str(FILE.parent), "-k", CHOSEN, str(FILE)]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    counts = re.search(r"(\d+) passed, (\d+) skipped", ran.stdout)
    assert ran.returncode == 0 and counts is not None, ran.stdout + ran.stderr
    strategies, transports = 5, 2
    skipped = 2  # tests that need a late device
    without = 2 if torch.version.cuda is not None else 0  # torch's own NCCL would be used, not the pretended one
    assert int(counts[1]) == 3 * strategies * transports + 4 - without, ran.stdout
    assert int(counts[2]) == skipped + without, ran.stdout
