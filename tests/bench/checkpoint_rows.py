"""Measures the peak memory while an optimizer is saved and loaded. Each figure comes from a process of its own, forked
from `python -m bench.checkpoint_rows`, which has only imported what both need."""

import ctypes
import gc
import importlib
import json
import multiprocessing
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench import optimizer_configs, workload
from bench.optimizer_configs import CONFIGURATIONS
from bench.resident_memory import environment, reset_peak, status
from bench.workload import Shapes
from torch_ext.checkpoint import files


class Peak(NamedTuple):
    """Memory of one save or load, in bytes."""

    state: int  # the optimizer's state as it is stored in memory
    decoded: int  # the same state decoded, as state_dict() returns it
    extra: int  # the peak resident memory, less what was resident before the save or load


def save_dcp(optimizer: Any, folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save({"optimizer": optimizer}, checkpoint_id=folder / "dcp")


def load_dcp(optimizer: Any, folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.load({"optimizer": optimizer}, checkpoint_id=folder / "dcp")


def save_file(optimizer: Any, folder: Path) -> None:
    files.save(optimizer.state_dict(), folder / "file")


def load_file(optimizer: Any, folder: Path) -> None:
    optimizer.load_state_dict(files.load(folder / "file"))


WAYS = {"dcp": (save_dcp, load_dcp), "file": (save_file, load_file)}


def measure(name: str, way: str, shapes: Shapes, seed: int) -> tuple[Peak, Peak]:
    """Returns the memory of saving, and of loading into an optimizer that has no state yet. Raises RuntimeError if
    either fails."""
    question = json.dumps([name, way, shapes, seed])
    command = [sys.executable, "-m", "bench.checkpoint_rows"]
    run = subprocess.run(command, input=question, capture_output=True, text=True, env=environment())
    if run.returncode:
        raise RuntimeError(f"measuring a checkpoint failed: {run.stderr.strip()[-500:]}")
    saving, loading = json.loads(run.stdout)
    return Peak(*saving), Peak(*loading)


def _answers(name: str, way: str, shapes: Shapes, seed: int) -> list[Peak]:
    """Measures a save and a load, each in a process that is forked from this new one."""
    importlib.import_module("torch.distributed.checkpoint")
    torch.set_num_threads(1)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for loads in (False, True):
            with multiprocessing.get_context("fork").Pool(1) as pool:
                found.append(pool.apply(_answer, (name, way, loads, shapes, seed, folder)))
    return found


def _answer(name: str, way: str, loads: bool, shapes: Shapes, seed: int, folder: str) -> Peak:
    """Measures in this new process, after a small run."""
    warnings.simplefilter("ignore")  # DCP warns that there is one process
    with tempfile.TemporaryDirectory() as small:  # a small run first, which starts threads and loads code
        for each in (False, True):
            measure_here(name, way, each, [(1 << 16,)], seed, Path(small))
    return measure_here(name, way, loads, shapes, seed, Path(folder))


def measure_here(name: str, way: str, loads: bool, shapes: Shapes, seed: int, folder: Path) -> Peak:
    """Measures in this process. loads: whether to measure loading, not saving."""
    save, load = WAYS[way]
    training = optimizer_configs.ours(CONFIGURATIONS[name], shapes, seed)
    if not loads:
        training.step()
    for p in training.params:
        p.grad = None
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    reset_peak()
    before = status("VmRSS")
    (load if loads else save)(training.optimizer, folder)
    extra = status("VmHWM") - before
    state = {t for p in training.params for t in training.optimizer.state[p].values()}
    logical = [v for entry in training.optimizer.state_dict()["state"].values() for v in entry.values()]
    return Peak(workload.unique_bytes(state), sum(t.nbytes for t in logical), extra)


if __name__ == "__main__":
    print(json.dumps(_answers(*json.load(sys.stdin))))
