"""Runs tests of tests/gpu on the CPU, so that the first machine with a GPU finds no mistake in the tests themselves.
What needs CUDA graphs, a second device, torch's profiler or a poisoned device is not tested here."""

import os
import pathlib
import re
import subprocess
import sys

import torch_ext

TESTS = pathlib.Path(os.path.abspath(__file__)).parents[1]

# A plugin of pytest: replaces the functions of torch.cuda that the tests call, and selects tests by their names. (-k
# would look for a word in the folders' names as well.)
PRETENDED = """
import contextlib
import re
import torch

def pytest_collection_modifyitems(config, items):
    left_out = [item for item in items if re.search({left_out!r}, item.name)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]

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
FILES = ["operators", "training", "extras", "devices", "graphs", "muon"]
NOT_HERE = "replayed|capture|148|near_the_iteration|somebody_elses|beside_one_on_the_gpu"
FEWER = r"fp16|8bit|stochastic|unaligned|random_models.*\[[3-9]|random_models.*\[1\d"  # repeat what others do


def test_the_bodies_pass_without_a_gpu(tmp_path: pathlib.Path) -> None:
    (tmp_path / "pretended_cuda.py").write_text(PRETENDED.replace("{left_out!r}", repr(f"{NOT_HERE}|{FEWER}")))
    package = os.path.dirname(os.path.dirname(os.path.abspath(torch_ext.__file__)))
    folders = [str(tmp_path), package, *(str(TESTS / name) for name in ("gpu", "torch", "distributed", "")), *sys.path]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, folders)),
        "TORCH_EXT_GPU_TESTS_DEVICE": "cpu",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "pretended_cuda"]
    command += ["-c", "/dev/null", "--rootdir", str(TESTS / "gpu")]
    command += [str(TESTS / f"gpu/test_gpu_{name}.py") for name in FILES]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500)
    counts = re.search(r"(\d+) passed, (\d+) skipped, \d+ deselected", ran.stdout)
    assert ran.returncode == 0 and counts is not None, ran.stdout + ran.stderr
    assert int(counts[1]) > 100, ran.stdout
