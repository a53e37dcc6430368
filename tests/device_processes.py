"""Processes that test or measure on a device, which may crash, hang, or leave it unusable: how they are started and
ended, and the journal in which they say what they do. A process that takes over goes on from the journal: a file of
lines of JSON, which tests/gpu/journal.py and bench/measuring_process.py describe."""

import contextlib
import ctypes
import json
import os
import pathlib
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

DEAD = 70  # exit status of a process whose device is dead
LONGEST = 4000  # characters of a failure's text in a report; its end is kept, which has the error
_PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>


# -- for the process that starts others -----------------------------------------------------------------------------


@contextlib.contextmanager
def started(
    command: list[str], output: Any, environment: dict[str, str], folder: pathlib.Path | None = None
) -> Iterator["subprocess.Popen[bytes]"]:
    """Starts a process in a new session, in `folder`; on exit kills it with all processes that it started."""
    nowhere = subprocess.DEVNULL
    process = subprocess.Popen(
        command, stdin=nowhere, stdout=output, stderr=output, env=environment, cwd=folder, start_new_session=True
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # the driver may keep it alive
            process.wait(5)


def abort(process: "subprocess.Popen[Any]") -> None:
    """Ends the process by SIGABRT, on which faulthandler prints where each thread is."""
    process.send_signal(signal.SIGABRT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(3)


def ending(status: int) -> str:
    """Says how a process with this exit status has ended."""
    if status < 0:
        return f"it ended by signal {-status} ({signal.strsignal(-status)})"
    return f"it ended with status {status}"


@contextlib.contextmanager
def stopped_by_sigterm() -> Iterator[None]:
    """Within the context SIGTERM raises SystemExit, so that the running processes are ended too."""

    def stop(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# -- for the processes that are started -----------------------------------------------------------------------------


def end_with_parent() -> None:
    """Makes the kernel kill this process when the one that started it dies, however that happens: a process that goes
    on would keep the device busy."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


# -- the journal ----------------------------------------------------------------------------------------------------


def lines(journal: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the journal's lines. Leaves out a last line that is written in part so far."""
    whole, _, _ = (journal.read_text() if journal.exists() else "").rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


def add(journal: pathlib.Path, **line: Any) -> None:
    with journal.open("ab", buffering=0) as file:
        file.write(json.dumps(line).encode() + b"\n")
