"""python tests/bench --device cuda --variants FOLDER: compares builds of the CUDA library with each other. Each build
runs in a process of its own; the processes take turns on one device."""

import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from bench.optimizer_configs import CONFIGURATIONS
from bench.row import Bench
from bench.timing import Times, ratio
from torch_ext.native import cuda_library

ORDINARY, PLAIN, COPY = "ordinary", "plain", "copy"
_STEPS = 5


class Worker:
    """The process of one build, which runs variant_worker.py."""

    def __init__(self, library: str, arguments: Sequence[object]) -> None:
        environment = os.environ | {"TORCH_EXT_CUDA_LIBRARY": library, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-m", "bench.variant_worker", *map(str, arguments)]
        self._library = library
        self._process: Any = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def answer(self, line: str = "") -> str:
        """Sends a line and returns the answer to it. Without a line it returns what the process says when it has
        started."""
        if line:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        said = str(self._process.stdout.readline()).strip()
        if not said:
            raise RuntimeError(f"the process with {self._library} ended with status {self._process.wait()}")
        return said

    def end(self) -> None:
        self._process.stdin.close()
        self._process.wait()


def libraries(folder: pathlib.Path, device: str) -> dict[str, str]:
    """Returns name -> file of each build. "ordinary" is the library that is loaded by default."""
    found = {file.stem: str(file) for file in sorted(folder.glob("*.so"))}
    if PLAIN not in found:
        raise ValueError(f"there is no {PLAIN}.so in {folder}, which others are compared with")
    return {ORDINARY: cuda_library.path() if device != "cpu" else found[PLAIN]} | found


@contextmanager
def _workers(builds: dict[str, str], arguments: Sequence[object]) -> Iterator[dict[str, Worker]]:
    """Yields a running process for each build. They end with the context."""
    started: dict[str, Worker] = {}
    try:
        for name, library in builds.items():
            started[name] = Worker(library, arguments)
        for worker in started.values():
            worker.answer()
        yield started
    finally:
        for worker in started.values():
            worker.end()


def _times(workers: dict[str, Worker], rounds: int) -> Times:
    """Returns the seconds of each round. Every second round runs in reverse order, as in timing.interleave."""
    turn = [(name, worker, f"step {_STEPS}") for name, worker in workers.items()]
    turn.append((COPY, workers[ORDINARY], f"copy {_STEPS}"))
    times: Times = {name: [] for name, _, _ in turn}
    for _ in range(rounds):
        for name, worker, line in turn:
            times[name].append(float(worker.answer(line)))
        turn.reverse()
    return times


def variants(bench: Bench, folder: pathlib.Path, device: str, names: Sequence[str] = tuple(CONFIGURATIONS)) -> None:
    """Adds figures of each build: the time of the plain build / its own, and its fraction of the copy bandwidth. Raises
    AssertionError if the builds do not leave the same bits."""
    builds = libraries(folder, device)
    for name in names:
        configuration = CONFIGURATIONS[name]
        with _workers(builds, (name, bench.params, bench.seed, device)) as workers:
            times = _times(workers, bench.rounds)
            bits = {build: worker.answer("bits") for build, worker in workers.items()}
        if len(set(bits.values())) != 1:
            raise AssertionError(f"{name}: builds of other bits: {bits}")
        bench.findings.times[f"variants {name}"] = times
        for build in builds:
            beside = {"fraction of the copy bandwidth": ratio(times, COPY, build).median}
            what = f"{name} ({configuration.about}): {PLAIN} / {build}"
            bench.add("variants", what, ratio(times, PLAIN, build), None, beside)
