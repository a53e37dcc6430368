"""A neighbour process that keeps one core busy while steps are timed."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# It checks who its parent is, so that it also ends if the benchmark is killed.
_BUSY = """
import os, sys
parent, core = int(sys.argv[1]), int(sys.argv[2])
os.sched_setaffinity(0, [core])
print("busy", flush=True)
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""


@contextmanager
def busy() -> Iterator[int]:
    """Runs a process that spins on the last core that the benchmark may use, for as long as the context lasts. Yields
    its process id."""
    core = max(os.sched_getaffinity(0))
    command = [sys.executable, "-c", _BUSY, str(os.getpid()), str(core)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        if process.stdout.readline() != "busy\n":
            raise RuntimeError(f"the neighbour process ended with status {process.wait()} before it was busy")
        yield process.pid
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
