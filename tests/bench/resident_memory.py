"""Measures the resident bytes of configurations, in a process of its own: python -m bench.resident_memory."""

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
    """The memory of a configuration in bytes per parameter."""

    storage: float  # unique storages of parameters, gradients and state
    peak_rss: float  # the peak while they are created and stepped, less what was resident before


def measure(configurations: list[str], shapes: Shapes, seed: int, threads: int) -> dict[str, Memory]:
    """Measures in a new process, so that earlier allocations do not count. Raises RuntimeError if it fails."""
    question = json.dumps([configurations, shapes, seed, threads])
    command = [sys.executable, "-m", "bench.resident_memory"]
    run = subprocess.run(command, input=question, capture_output=True, text=True, env=environment())
    if run.returncode:
        raise RuntimeError(f"measuring memory failed: {run.stderr.strip()[-500:]}")
    return {name: Memory(*values) for name, values in json.loads(run.stdout).items()}


def environment() -> dict[str, str]:
    """Returns the environment of a process that imports this `bench` and this `torch_ext`."""
    tests = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    folders = [os.path.dirname(tests), tests, os.environ.get("PYTHONPATH")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))}


def _answer(configurations: list[str], shapes: Shapes, seed: int, threads: int) -> dict[str, Memory]:
    torch.set_num_threads(threads)
    for name in configurations:  # small runs first, which start threads and load code
        measure_here(name, [(1 << 16,)], seed)
    return {name: measure_here(name, shapes, seed) for name in configurations}


def measure_here(name: str, shapes: Shapes, seed: int) -> Memory:
    """Measures in this process. The peak is too small if earlier memory is freed meanwhile."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # returns the heap's free memory to the system, so that it is not counted
    reset_peak()
    before = status("VmRSS")
    training = optimizer_configs.ours(CONFIGURATIONS[name], shapes, seed)
    for _ in range(3):
        training.step()
    params = workload.numel(shapes)
    return Memory(optimizer_configs.resident(training, params), (status("VmHWM") - before) / params)


def reset_peak() -> None:
    """Resets VmHWM, the peak resident memory, to what is resident now."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def status(key: str) -> int:
    """Returns the value of a line of /proc/self/status, in bytes."""
    with open("/proc/self/status") as file:
        (line,) = (line for line in file if line.startswith(key + ":"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    print(json.dumps(_answer(*json.load(sys.stdin))))
