"""Runs tests of tests/gpu on the CPU, so that the first machine with a GPU finds no mistake in the tests themselves.
What needs CUDA graphs, a second device, torch's profiler or a poisoned device is not tested here."""

import os
import pathlib
import re
import subprocess
import sys

import torch_ext

TESTS = pathlib.Path(os.path.abspath(__file__)).parents[1]

# A plugin of pytest in place of the functions of torch.cuda that the tests call.
PRETENDED = """
import contextlib
import torch

class Stream:
    def wait_stream(self, other): pass
    def synchronize(self): pass
    def query(self): return False  # as if work were still under way

torch.cuda.Stream = Stream
torch.cuda.current_stream = Stream
torch.cuda.stream = lambda stream: contextlib.nullcontext()
torch.cuda.synchronize = lambda: None
torch.cuda.set_sync_debug_mode = lambda mode: None
torch.cuda.mem_get_info = lambda device: (0, 0)
torch.cuda._sleep = lambda cycles: None
"""
FILES = ["operators", "training", "extras", "devices", "graphs"]
NOT_HERE = "replayed or capture or 148 or somebody_elses or beside_one_on_the_gpu"
FEWER = "fp16 or 8bit or stochastic or unaligned"  # repeat with other dtypes what others do


def test_the_bodies_pass_without_a_gpu(tmp_path: pathlib.Path) -> None:
    (tmp_path / "pretended_cuda.py").write_text(PRETENDED)
    package = os.path.dirname(os.path.dirname(os.path.abspath(torch_ext.__file__)))
    folders = [str(tmp_path), package, *(str(TESTS / name) for name in ("gpu", "torch", "distributed", "")), *sys.path]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, folders)),
        "TORCH_EXT_GPU_TESTS_DEVICE": "cpu",
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "pretended_cuda",
        "-c",
        "/dev/null",
    ]
    command += ["--rootdir", str(TESTS / "gpu"), "-k", f"not ({NOT_HERE} or {FEWER})"]
    command += [str(TESTS / f"gpu/test_gpu_{name}.py") for name in FILES]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500)
    counts = re.search(r"(\d+) passed, (\d+) skipped, \d+ deselected", ran.stdout)
    assert ran.returncode == 0 and counts is not None, ran.stdout + ran.stderr
    assert int(counts[1]) > 100, ran.stdout
