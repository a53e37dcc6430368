"""Runs faults of all kinds in turn, several at a time, and counts their outcomes."""

import argparse
import contextlib
import itertools
import os
import pathlib
import random
import time
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from soak import delta_faults, grad_programs, rank_faults, save_faults, step_programs, weight_faults, worlds
from soak.outcome import Outcome, Tally
from soak.worlds import World

# Case numbers of two seeds do not overlap.
_PER_SEED = 1_000_000


class Run(NamedTuple):
    """One case that is running, and its folder, which is deleted at the end."""

    kind: str
    number: int
    world: World
    case: Any
    folder: contextlib.ExitStack


class Family(Protocol):
    """Kinds of faults that are started and judged alike."""

    def kinds(self) -> dict[str, str]: ...

    def start(self, kind: str, number: int, folder: pathlib.Path) -> tuple[Any, World]: ...

    def judge(self, case: Any, world: World) -> Outcome: ...


class RankFaults:
    """Faults in ranks that train: rank_faults.py."""

    def kinds(self) -> dict[str, str]:
        return {kind: what for kind, (what, _) in rank_faults.KINDS.items()}

    def start(self, kind: str, number: int, folder: pathlib.Path) -> tuple[Any, World]:
        case = rank_faults.Case.of(kind, number)
        world = worlds.start(
            case.size, rank_faults.train, (case,), folder, timeout=rank_faults.TIMEOUT, store=case.store
        )
        world.on_told = rank_faults.on_told(case)
        return case, world

    def judge(self, case: Any, world: World) -> Outcome:
        return rank_faults.judge(case, world)


class SaveFaults:
    """Faults in saves and files of checkpoints: save_faults.py."""

    def kinds(self) -> dict[str, str]:
        return save_faults.KINDS

    def start(self, kind: str, number: int, folder: pathlib.Path) -> tuple[Any, World]:
        return save_faults.start(kind, number, folder)

    def judge(self, case: Any, world: World) -> Outcome:
        return save_faults.judge(case, world)


class DeltaFaults:
    """Faults in weight updates: delta_faults.py."""

    def kinds(self) -> dict[str, str]:
        return delta_faults.KINDS

    def start(self, kind: str, number: int, folder: pathlib.Path) -> tuple[Any, World]:
        return delta_faults.start(kind, number, folder)

    def judge(self, case: Any, world: World) -> Outcome:
        return delta_faults.judge(case, world)


class WeightFaults:
    """Faults in incremental weights: weight_faults.py."""

    def kinds(self) -> dict[str, str]:
        return weight_faults.KINDS

    def start(self, kind: str, number: int, folder: pathlib.Path) -> tuple[Any, World]:
        return weight_faults.start(kind, number, folder)

    def judge(self, case: Any, world: World) -> Outcome:
        return weight_faults.judge(case, world)


_PROGRAMS = {
    "program": "random training programs of 1 to 3 ranks, whose gradients are plain torch's bit for bit",
    "step_program": "random training programs of one process, whose weights are plain torch's",
}


class Programs:
    """Random training programs, without faults: grad_programs.py and step_programs.py."""

    def kinds(self) -> dict[str, str]:
        return _PROGRAMS

    def start(self, kind: str, number: int, folder: pathlib.Path) -> tuple[Any, World]:
        if kind == "step_program":
            case: Any = step_programs.Case.of(number)
            return case, worlds.start(1, step_programs.run, (case, folder), folder)
        case = grad_programs.Case.of(number)
        return case, worlds.start(case.size, grad_programs.run, (case,), folder, timeout=20.0)

    def judge(self, case: Any, world: World) -> Outcome:
        outcome = Outcome()
        for rank, answer in enumerate(world.answers):
            if answer is None:
                outcome.hung.append(f"rank {rank} did not end")
            elif not isinstance(answer, str):
                outcome.crashed.append(f"rank {rank}: {getattr(answer, 'trace', answer)}")
            elif answer:
                outcome.silent.append(f"rank {rank}: {answer}")
        return outcome


_FAMILIES: list[Family] = [RankFaults(), SaveFaults(), DeltaFaults(), WeightFaults(), Programs()]
_OF_KIND: dict[str, Family] = {kind: family for family in _FAMILIES for kind in family.kinds()}


def kinds() -> list[str]:
    return list(_OF_KIND)


def run(arguments: argparse.Namespace) -> int:
    """Runs what the arguments say and prints the tallies. Returns the exit status."""
    worlds.preload()
    if arguments.replay:
        kind, _, number = arguments.replay.partition(":")
        cases: Iterator[tuple[str, int]] = itertools.repeat((kind, int(number)), arguments.runs or 1)
        chosen = [kind]
    else:
        chosen = arguments.kinds or kinds()
        cases = _cases(chosen, arguments.seed, arguments.runs)
    tallies = {kind: Tally(kind, _OF_KIND[kind].kinds()[kind]) for kind in chosen}
    end = time.monotonic() + arguments.seconds
    _run_all(cases, tallies, jobs=arguments.jobs, end=end, until_found=arguments.until_found)
    for tally in tallies.values():
        print(tally, flush=True)
    if skips := sum(tally.skips for tally in tallies.values()):
        print(f"{skips} runs were SKIPPED: what they are to find was not looked for", flush=True)
    return int(any(tally.failed for tally in tallies.values()))


def _cases(chosen: list[str], seed: int, runs: int | None) -> Iterator[tuple[str, int]]:
    """Yields (kind, number) of each case: all kinds in a random order, then all kinds again."""
    for number in itertools.count() if runs is None else range(runs):
        for kind in random.Random(number).sample(chosen, len(chosen)):
            yield kind, seed * _PER_SEED + number


def _run_all(
    cases: Iterator[tuple[str, int]], tallies: dict[str, Tally], *, jobs: int, end: float, until_found: bool
) -> None:
    """Runs cases, `jobs` at a time, and starts none after `end`. until_found: ends with the first that finds something;
    the others that are running then are not judged."""
    running: list[Run] = []
    while True:
        while len(running) < jobs and time.monotonic() < end:
            try:
                running.append(_start(*next(cases)))
            except StopIteration:
                end = 0.0
        if not running:
            return
        worlds.wait([one.world for one in running])
        for one in [one for one in running if one.world.done or time.monotonic() > one.world.deadline]:
            running.remove(one)
            _finish(one, tallies[one.kind])
            if until_found and tallies[one.kind].failed:
                for other in running:
                    other.folder.close()
                return


def _start(kind: str, number: int) -> Run:
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(worlds.scratch())
        case, world = _OF_KIND[kind].start(kind, number, folder)
        stack.enter_context(contextlib.closing(world))
        return Run(kind, number, world, case, stack.pop_all())


def _finish(one: Run, tally: Tally) -> None:
    """Judges a case and prints what was found, with the command that repeats it."""
    with one.folder:
        outcome = _OF_KIND[one.kind].judge(one.case, one.world)
        if problems := outcome.problems():
            load = f"{os.getloadavg()[0]:.0f} processes want to run"
            print(f"python tests/soak --replay {one.kind}:{one.number}   # {load}; {one.case}", flush=True)
            for problem in problems:
                print(f"  {problem}", flush=True)
            if outcome.hung or outcome.crashed:
                print(one.world.stacks(), flush=True)
        tally.add(outcome)
