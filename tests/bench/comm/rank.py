"""The process of one rank of `bench comm`: python -m bench.comm.rank FOLDER RANK.

It reads the question from the folder and writes the answer to each job there when the job is done. It ends when its
standard input is closed.
"""

import datetime
import gc
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from bench.comm import comm_accuracy
from bench.comm.contenders import CONTENDERS, Loop, Size, Task
from bench.comm.networks import sent_bytes

_Built = TypeVar("_Built")

QUESTION = "question.json"

_WARM_UP = 3  # steps of each contender before the first round: DDP rebuilds its buckets after the first of them
_STEPS = 2  # steps per timing, after an untimed one, since other contenders used the link before
_CONTENDER = datetime.timedelta(seconds=30)  # timeout of a contender's process group
_WORLD = datetime.timedelta(seconds=150)  # timeout of the default group, longer: errors of contenders are sent over it


class Job(NamedTuple):
    """Contenders to compare with each other in one run."""

    kind: str  # a key of KINDS
    contenders: list[str]
    rounds: int = 1
    compute: float = 0.0  # seconds slept in a backward


class Question(NamedTuple):
    """What the ranks of a network are asked to do; the same for all of them."""

    world_size: int
    interface: str
    size: Size
    seed: int
    jobs: list[Job]

    def as_json(self) -> str:
        return json.dumps(self)

    @classmethod
    def of_json(cls, text: str) -> "Question":
        world_size, interface, size, seed, jobs = json.loads(text)
        return cls(world_size, interface, Size(*size), seed, [Job(*job) for job in jobs])


@dataclass
class Answer:
    """The findings of one rank in one job, by contender."""

    seconds: dict[str, list[float]] = field(default_factory=dict)  # of a step, one per round
    cpu: dict[str, list[float]] = field(default_factory=dict)  # of a step: all threads, user and system time
    sent: dict[str, list[float]] = field(default_factory=dict)  # bytes of a step, as the interface counts them
    wire_bytes: dict[str, int | None] = field(default_factory=dict)  # of the last step, by torch_ext's own count
    errors: dict[str, float] = field(default_factory=dict)  # of the gradient, relative
    refused: dict[str, str] = field(default_factory=dict)  # why it did not take part


def answer_file(job: int, rank: int) -> str:
    return f"answer {job}, rank {rank}.json"


def _time(question: Question, job: Job) -> Answer:
    """Builds the contenders of a job and times them in turn."""
    answer = Answer()

    def build(name: str, group: dist.ProcessGroup) -> Loop:
        loop = CONTENDERS[name](Task(question.size, job.compute, group, question.seed))
        for _ in range(_WARM_UP):
            loop.step()
        return loop

    loops: dict[str, Loop] = {}
    for name in job.contenders:
        loop, why = _everywhere(partial(build, name))
        if loop is None:
            answer.refused[name] = why
        else:
            loops[name] = loop
    turn = list(loops.items())
    gc.collect()
    gc.disable()
    for _ in range(job.rounds):
        for name, loop in turn:
            step = _turn(loop, question.interface)
            answer.seconds.setdefault(name, []).append(step.seconds)
            answer.cpu.setdefault(name, []).append(step.cpu)
            answer.sent.setdefault(name, []).append(step.sent)
            answer.wire_bytes[name] = loop.wire_bytes
        turn.reverse()
    gc.enable()
    return answer


class _Step(NamedTuple):
    """The mean of the steps of one turn."""

    seconds: float
    cpu: float
    sent: float


def _turn(loop: Loop, interface: str) -> _Step:
    """Times a few steps of one contender."""
    loop.step()
    before = _sent_by_all(interface)
    begin, cpu_begin = time.perf_counter(), time.process_time()
    for _ in range(_STEPS):
        loop.step()
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu_begin
    sent = _sent_by_all(interface) - before
    loop.finish()
    return _Step(seconds / _STEPS, cpu / _STEPS, sent / _STEPS)


def _sent_by_all(interface: str) -> int:
    """Returns the interface's counter at a moment when no rank steps. All ranks return together."""
    dist.barrier()
    sent = sent_bytes(interface)
    dist.barrier()
    return sent


def _everywhere(build: Callable[[dist.ProcessGroup], _Built]) -> tuple[_Built | None, str]:
    """Calls `build` with a new process group, so that a contender cannot break the groups of others. Returns its
    result. If `build` fails on any rank, all ranks return None and the error of the first rank that failed."""
    built, why = None, ""
    group = dist.new_group(timeout=_CONTENDER)
    assert isinstance(group, dist.ProcessGroup)
    try:
        built = build(group)
    except Exception as error:  # of any kind: it is printed in the figure's line
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
    whys: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(whys, why)
    why = next(filter(None, whys), "")
    return (None if why else built), why


def _compare_errors(question: Question, job: Job) -> Answer:
    """Measures the gradient errors of the contenders of a job."""
    answer = Answer()
    for name in job.contenders:
        error, why = _everywhere(partial(comm_accuracy.measure, name, question.seed))
        if error is None:
            answer.refused[name] = why
        else:
            answer.errors[name] = error
    return answer


KINDS: dict[str, Callable[[Question, Job], Answer]] = {"timing": _time, "accuracy": _compare_errors}


def _end_with_input() -> None:
    """Ends this process when standard input is closed: then the benchmark's process, which has the other end, is
    gone."""
    sys.stdin.read()
    os._exit(1)


def main(arguments: Sequence[str]) -> None:
    folder, rank = Path(arguments[0]), int(arguments[1])
    question = Question.of_json((folder / QUESTION).read_text())
    threading.Thread(target=_end_with_input, daemon=True).start()
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"  # namespaces share the files
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=question.world_size, timeout=_WORLD)
    for i, job in enumerate(question.jobs):
        answer = KINDS[job.kind](question, job)
        unfinished = folder / f"unfinished, rank {rank}"
        unfinished.write_text(json.dumps(asdict(answer)))
        unfinished.rename(folder / answer_file(i, rank))
    dist.barrier()
    os._exit(0)  # without waiting for work that contenders have left unfinished


if __name__ == "__main__":
    main(sys.argv[1:])
