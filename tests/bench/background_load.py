"""Processes that run a kernel while the benchmark times it, as the other threads of a step do. Each process is a
`python -m bench.background_load`.

A kernel can be slower on several threads than on one if two of them share a core. A virtual machine does not know
whether its processors do, and its host may change it. They are processes because the interpreter's lock would serialize
threads.
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


class BackgroundLoad:
    """Starts `count` processes. They rest until `running`, and end with the context."""

    def __init__(self, count: int, seed: int) -> None:
        self._seed = seed
        self.calls: list[int] = []
        """How many batches of calls each process completed when they last ran."""
        command = [sys.executable, "-m", "bench.background_load"]
        self._processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment())
            for _ in range(count)
        ]

    @contextmanager
    def running(self, configuration: str, isa: str) -> Iterator[None]:
        """Lets the processes step small tensors of their own for as long as the context lasts. Raises RuntimeError if
        one of them has ended."""
        self._ask(f"{configuration} {isa} {self._seed}", "running")
        try:
            yield
        finally:
            self.calls = list(map(int, self._ask("rest", "resting")))

    def _ask(self, what: str, answer: str) -> list[str]:
        """Sends a line to each process and returns what each adds to the expected answer."""
        for process in self._processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # the process has ended; the missing answer is reported below
                print(what, file=process.stdin, flush=True)
        added = []
        for process in self._processes:
            assert process.stdout is not None
            said, _, more = process.stdout.readline().strip().partition(" ")
            if said != answer:
                raise RuntimeError(f"a process beside this one ended with status {process.wait()}")
            added.append(more)
        return added

    def __enter__(self) -> "BackgroundLoad":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()  # waits for its end and closes its pipes


def main() -> None:
    """Runs one process: answers "CONFIGURATION ISA SEED" by running the kernel until the next line comes."""
    torch.set_num_threads(1)
    made: dict[str, InCache] = {}
    for asked in iter(sys.stdin.readline, ""):  # the input ends when the benchmark's process does
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
