"""Resident bytes of a configuration, measured in a process of its own: python -m torch_ext._bench_memory."""

import json
import os
import subprocess
import sys
from typing import NamedTuple

import torch

from torch_ext import _bench_configurations, _bench_tensors
from torch_ext._bench_configurations import CONFIGURATIONS
from torch_ext._bench_tensors import Shapes


class Memory(NamedTuple):
    """Bytes per parameter."""

    storage: float  # unique storages of parameters, gradients and state
    peak_rss: float  # the most that was resident while they were made and stepped, less what was there before


def measure(configuration: str, shapes: Shapes, seed: int, threads: int) -> Memory:
    """In a fresh process, so that nothing else that was ever allocated counts. Raises RuntimeError where it fails."""
    question = json.dumps([configuration, shapes, seed, threads])
    command = [sys.executable, "-m", "torch_ext._bench_memory"]
    # The package that answers is the one that asks.
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    run = subprocess.run(
        command, input=question, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    if run.returncode:
        raise RuntimeError(f"measuring the memory of {configuration} failed: {run.stderr.strip()[-500:]}")
    return Memory(*json.loads(run.stdout))


def _answer(configuration: str, shapes: Shapes, seed: int, threads: int) -> Memory:
    torch.set_num_threads(threads)
    params = _bench_tensors.numel(shapes)
    _bench_configurations.ours(CONFIGURATIONS[configuration], [(1 << 16,)], seed).step()  # starts threads, loads code
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak is from now on
    before = _status("VmRSS")
    training = _bench_configurations.ours(CONFIGURATIONS[configuration], shapes, seed)
    for _ in range(3):
        training.step()
    return Memory(_bench_configurations.resident(training, params), (_status("VmHWM") - before) / params)


def _status(key: str) -> int:
    """A line of /proc/self/status, in bytes."""
    with open("/proc/self/status") as file:
        (line,) = (line for line in file if line.startswith(key + ":"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    print(json.dumps(_answer(*json.load(sys.stdin))))
