"""Processes that run a kernel beside ours, as the other threads of a step do: python -m bench.background_load is one.

What a kernel needs on one thread is not what it needs on several where two of these have a core together, which a guest
is not told, and which its host changes as it likes. Processes, since the interpreter's lock would keep threads apart.
"""

import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType

import torch

from bench import optimizer_configs
from bench.l1 import InCache
from bench.optimizer_configs import CONFIGURATIONS
from bench.resident_memory import environment


class Beside:
    """Starts `count` of them; they rest until they are asked to run, and end with the context."""

    def __init__(self, count: int, seed: int) -> None:
        self._seed = seed
        self.calls: list[int] = []
        """How many batches of calls each of them made when they last ran."""
        command = [sys.executable, "-m", "bench.background_load"]
        self._processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment())
            for _ in range(count)
        ]

    @contextmanager
    def running(self, configuration: str, isa: str) -> Iterator[None]:
        """They step small tensors of their own for as long as the context lasts. RuntimeError if one of them ended."""
        self._ask(f"{configuration} {isa} {self._seed}", "running")
        try:
            yield
        finally:
            self.calls = list(map(int, self._ask("rest", "resting")))

    def _ask(self, what: str, answer: str) -> list[str]:
        """What each of them adds to the answer."""
        for process in self._processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # it does not answer, either
                print(what, file=process.stdin, flush=True)
        added = []
        for process in self._processes:
            assert process.stdout is not None
            said, _, more = process.stdout.readline().strip().partition(" ")
            if said != answer:
                raise RuntimeError(f"a process beside this one ended with status {process.wait()}")
            added.append(more)
        return added

    def __enter__(self) -> "Beside":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()  # waits for it and closes its pipes


def main() -> None:
    torch.set_num_threads(1)
    made: dict[str, InCache] = {}
    for asked in iter(sys.stdin.readline, ""):  # the other end closes with its process
        name, isa, seed = asked.split()
        optimizer_configs.select_isa(isa)
        cached = made.get(name) or made.setdefault(name, InCache(CONFIGURATIONS[name], int(seed)))
        cached.batch()
        print("running", flush=True)
        calls = 0
        while not select.select([sys.stdin], [], [], 0)[0]:
            cached.batch()
            calls += 1
        sys.stdin.readline()
        print(f"resting {calls}", flush=True)


if __name__ == "__main__":
    main()
