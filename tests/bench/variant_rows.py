"""python tests/bench --device cuda --variants FOLDER: compares builds of the CUDA library with each other. Each build
runs in a process of its own; the processes take turns on one device."""

import contextlib
import os
import pathlib
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from bench.optimizer_configs import CONFIGURATIONS
from bench.row import Bench
from bench.timing import Times, ratio
from torch_ext.native import cuda_library

ORDINARY, PLAIN, COPY = "ordinary", "plain", "copy"
_STEPS = 5
_PATIENCE, _FAREWELL = 60.0, 5.0  # seconds for an answer, and to end


class Lost(RuntimeError):
    """The process of a build has ended, or does not answer."""


class Worker:
    """The process of one build, which runs variant_worker.py."""

    def __init__(self, library: str, arguments: Sequence[object], patience: float = _PATIENCE) -> None:
        """patience: seconds after which a process that does not answer is killed."""
        environment = os.environ | {"TORCH_EXT_CUDA_LIBRARY": library, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-m", "bench.variant_worker", *map(str, arguments)]
        self._library, self._patience = library, patience
        self._process: Any = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def answer(self, line: str = "") -> str:
        """Sends a line and returns the answer to it. Without a line it returns what the process says when it has
        started. Raises Lost if there is none."""
        killer = threading.Timer(self._patience, self._process.kill)
        killer.start()
        try:
            if line:
                self._process.stdin.write(line + "\n")
                self._process.stdin.flush()
            said = str(self._process.stdout.readline()).strip()
        except BrokenPipeError:
            said = ""
        finally:
            killer.cancel()
        if not said:
            raise Lost(
                f"the process with {self._library} ended with status {self._process.wait()}, or was killed since it "
                f"did not answer for {self._patience:g} s"
            )
        return said

    def end(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        killer = threading.Timer(_FAREWELL, self._process.kill)
        killer.start()
        self._process.wait()
        killer.cancel()


def libraries(folder: pathlib.Path, device: str) -> dict[str, str]:
    """Returns name -> file of each build. "ordinary" is the library that is loaded by default."""
    found = {file.stem: str(file) for file in sorted(folder.glob("*.so"))}
    if PLAIN not in found:
        raise ValueError(f"there is no {PLAIN}.so in {folder}, which others are compared with")
    return {ORDINARY: cuda_library.path() if device != "cpu" else found[PLAIN]} | found


class Builds:
    """The running processes of the builds of one configuration. One whose process is lost is left out from then on."""

    def __init__(self, builds: dict[str, str], arguments: Sequence[object]) -> None:
        self._workers: dict[str, Worker] = {}
        self.lost: dict[str, str] = {}
        """Name of a build -> why it was left out."""
        try:
            for name, library in builds.items():
                self._workers[name] = Worker(library, arguments)
            for name in builds:
                self.answer(name)
        except BaseException:
            self.end()
            raise

    @property
    def names(self) -> list[str]:
        return [name for name in self._workers if name not in self.lost]

    def answer(self, name: str, line: str = "") -> str:
        """Returns the answer of a build; "" if its process is lost. Raises Lost for the two builds that others are
        compared with."""
        if name in self.lost:
            return ""
        try:
            return self._workers[name].answer(line)
        except Lost as error:
            if name in (ORDINARY, PLAIN):
                raise
            self.lost[name] = str(error)
            return ""

    def end(self) -> None:
        for worker in self._workers.values():
            worker.end()


@contextmanager
def _running(builds: dict[str, str], arguments: Sequence[object]) -> Iterator[Builds]:
    """Yields the builds' processes. They end with the context."""
    started = Builds(builds, arguments)
    try:
        yield started
    finally:
        started.end()


def _times(builds: Builds, rounds: int) -> Times:
    """Returns the seconds of each round, of builds that are not lost. Every second round runs in reverse order, as in
    timing.interleave."""
    turn = [(name, name, f"step {_STEPS}") for name in builds.names]
    turn.append((COPY, ORDINARY, f"copy {_STEPS}"))
    times: Times = {name: [] for name, _, _ in turn}
    for _ in range(rounds):
        for name, build, line in turn:
            if answer := builds.answer(build, line):
                times[name].append(float(answer))
        turn.reverse()
    return {name: seconds for name, seconds in times.items() if name not in builds.lost}


def variants(bench: Bench, folder: pathlib.Path, device: str, names: Sequence[str] = tuple(CONFIGURATIONS)) -> None:
    """Adds figures of each build: the time of the plain build / its own, and its fraction of the copy bandwidth. Raises
    AssertionError if the builds do not leave the same bits."""
    found = libraries(folder, device)
    for name in names:
        configuration = CONFIGURATIONS[name]
        what = f"{name} ({configuration.about}): {PLAIN}"
        with _running(found, (name, bench.params, bench.seed, device)) as builds:
            times = _times(builds, bench.rounds)
            bits = {build: builds.answer(build, "bits") for build in builds.names}
        for build, why in builds.lost.items():
            bench.skip("variants", f"{what} / {build}", why)
        bits = {build: number for build, number in bits.items() if build not in builds.lost}
        if len(set(bits.values())) != 1:
            raise AssertionError(f"{name}: builds of other bits: {bits}")
        bench.findings.times[f"variants {name}"] = times
        for build in bits:
            beside = {"fraction of the copy bandwidth": ratio(times, COPY, build).median}
            bench.add("variants", f"{what} / {build}", ratio(times, PLAIN, build), None, beside)
