"""Resident bytes of configurations, measured in a process of its own: python -m bench.resident_memory."""

import ctypes
import gc
import json
import os
import subprocess
import sys
from typing import NamedTuple

import torch

from bench import optimizer_configs, workload
from bench.optimizer_configs import CONFIGURATIONS
from bench.workload import Shapes


class Memory(NamedTuple):
    """Bytes per parameter."""

    storage: float  # unique storages of parameters, gradients and state
    peak_rss: float  # the most that was resident while they were made and stepped, less what was there before


def measure(configurations: list[str], shapes: Shapes, seed: int, threads: int) -> dict[str, Memory]:
    """In a fresh process, where nothing that was ever allocated for something else counts. Raises RuntimeError where it
    fails."""
    question = json.dumps([configurations, shapes, seed, threads])
    command = [sys.executable, "-m", "bench.resident_memory"]
    run = subprocess.run(command, input=question, capture_output=True, text=True, env=environment())
    if run.returncode:
        raise RuntimeError(f"measuring memory failed: {run.stderr.strip()[-500:]}")
    return {name: Memory(*values) for name, values in json.loads(run.stdout).items()}


def environment() -> dict[str, str]:
    """Of a process that imports this `bench` and this `torch_ext`."""
    tests = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    folders = [os.path.dirname(tests), tests, os.environ.get("PYTHONPATH")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))}


def _answer(configurations: list[str], shapes: Shapes, seed: int, threads: int) -> dict[str, Memory]:
    torch.set_num_threads(threads)
    for name in configurations:  # starts threads, loads code
        measure_here(name, [(1 << 16,)], seed)
    return {name: measure_here(name, shapes, seed) for name in configurations}


def measure_here(name: str, shapes: Shapes, seed: int) -> Memory:
    """In this process; memory that is freed while it is measured makes the peak too small."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what earlier runs left in the heap counts neither before nor after
    reset_peak()
    before = status("VmRSS")
    training = optimizer_configs.ours(CONFIGURATIONS[name], shapes, seed)
    for _ in range(3):
        training.step()
    params = workload.numel(shapes)
    return Memory(optimizer_configs.resident(training, params), (status("VmHWM") - before) / params)


def reset_peak() -> None:
    """VmHWM is the most that is resident from now on."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def status(key: str) -> int:
    """A line of /proc/self/status, in bytes."""
    with open("/proc/self/status") as file:
        (line,) = (line for line in file if line.startswith(key + ":"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    print(json.dumps(_answer(*json.load(sys.stdin))))
