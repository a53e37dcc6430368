"""Starts the ranks of `bench comm` and collects their answers. Ends the ranks in any case, within a time limit."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bench import resident_memory
from bench.comm.networks import Place
from bench.comm.rank import QUESTION, Answer, Question, answer_file

# Seconds. The grace period after a rank has failed lets the others fail and print their errors, too.
_POLL, _GRACE = 0.05, 1.0

_Process = subprocess.Popen[bytes]


class Answers(NamedTuple):
    """The answers of the ranks of one network."""

    of_jobs: list[list[Answer]]  # for each finished job, each rank's answer
    why_not_all: str  # why jobs are missing, in the words of the ranks; "" if none is


def ask(question: Question, places: Sequence[Place], limit: float) -> Answers:
    """Starts one rank at each place and waits for the answers. No rank is left when this returns or raises. limit: in
    seconds."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / QUESTION).write_text(question.as_json())
        processes: list[_Process] = []
        try:
            for rank, place in enumerate(places):
                processes.append(_start(folder, rank, place))
            why = _wait(processes, folder, limit)
        finally:
            for process in processes:
                process.kill()
                process.wait()
                assert process.stdin is not None
                process.stdin.close()
        return Answers(_read(folder, len(question.jobs), len(places)), why)


def _start(folder: Path, rank: int, place: Place) -> _Process:
    """Starts a rank. Its output goes to a file, for error messages."""
    command = [sys.executable, "-m", "bench.comm.rank", str(folder), str(rank)]
    environment = resident_memory.environment() | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": place.interface}
    with _output(folder, rank).open("wb") as output:
        return subprocess.Popen(
            [*place.command, *command],
            stdin=subprocess.PIPE,  # nothing is written, but it is closed when this process ends
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches this process only, which then ends the ranks
        )


def _wait(processes: Sequence[_Process], folder: Path, limit: float) -> str:
    """Waits for the ranks. Returns why they did not all finish; "" if they did."""
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        ended = [process.poll() for process in processes]
        if all(status == 0 for status in ended):
            return ""
        if any(ended):
            time.sleep(_GRACE)
            return "; ".join(_last_words(folder, i, process) for i, process in enumerate(processes) if process.poll())
        time.sleep(_POLL)
    return f"not done after {limit:g} s (--limit)"


def _output(folder: Path, rank: int) -> Path:
    return folder / f"output of rank {rank}"


def _last_words(folder: Path, rank: int, process: _Process) -> str:
    words = " ".join(_output(folder, rank).read_text(errors="replace").split())
    return f"rank {rank} ended with status {process.returncode}: {words[-400:]}"


def _read(folder: Path, jobs: int, ranks: int) -> list[list[Answer]]:
    """Reads the answers up to the first job that some rank has not answered: jobs are done in order."""
    answers = []
    for job in range(jobs):
        files = [folder / answer_file(job, rank) for rank in range(ranks)]
        if not all(file.exists() for file in files):
            break
        answers.append([Answer(**json.loads(file.read_text())) for file in files])
    return answers
