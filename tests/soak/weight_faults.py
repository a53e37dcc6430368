"""Faults of incremental weights: ranks that are killed while they save, files in which bits flip, full disks.

The last version whose parts are all there must load bit for bit. Damage must be an error that names the file."""

import os
import pathlib
import random
import re
import signal
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from soak import delta_faults, small_disk, worlds
from soak.outcome import Outcome, Report
from soak.worlds import Died, Line, Raised, World
from torch import Tensor

import torch_ext

KINDS = {
    "kill_weights": "kill -9 in IncrementalWeights.save, 1 to 3 ranks",
    "flip_weights": "bit flips and truncations of each file of incremental weights",
    "fill_weights": "IncrementalWeights.save to a small tmpfs",
}
_VERSIONS = 5
_FLIPS = 25
"""Flips in one run; each counts as a run of the kind."""
_FILLS = 8
"""Versions in one run; each counts as a run of the kind."""
_BOUND = 40.0
"""Seconds until a version must be there, on a busy machine."""
_TIMEOUT = 20.0


@dataclass(frozen=True)
class Case:
    """What one run does; all of it is drawn from the kind and a number."""

    kind: str
    seed: int
    size: int
    elements: int
    exact: bool
    sliceable: bool
    full_every: int
    together: bool
    """Whether ranks wait for each other at each version."""
    victim: int
    version: int
    """During which version the victim is killed."""
    delay: float
    """Seconds from the beginning of that version to the signal."""

    @classmethod
    def of(cls, kind: str, number: int) -> "Case":
        draw = random.Random(f"{kind} {number}")
        size = draw.choice([1, 1, 2, 3]) if kind == "kill_weights" else 1
        return cls(
            kind,
            draw.randrange(1 << 30),
            size,
            draw.choice([300, 3_000] if kind == "flip_weights" else [300, 20_000, 300_000]),
            draw.random() < 0.5,
            draw.random() < 0.3,
            draw.choice([2, 3, 100]),
            draw.random() < 0.7,
            draw.randrange(size),
            draw.randrange(1, _VERSIONS + 1),
            draw.random() ** 2 * 0.02,
        )


def _saver(case: Case, trainer: delta_faults.Trainer, folder: pathlib.Path) -> torch_ext.IncrementalWeights:
    return torch_ext.IncrementalWeights(folder, trainer.publisher, full_every=case.full_every)


def loaded(folder: pathlib.Path, like: dict[str, Tensor], version: int | None = None) -> tuple[int, dict[str, Tensor]]:
    """Loads a version, or the last one. Returns its number and its weights."""
    tensors = {name: torch.full_like(t, 7.0) for name, t in like.items()}
    return torch_ext.load_weights(folder, tensors, version=version), tensors


# -- the processes


def _saves(rank: int, _size: int, group: Any, line: Line, case: Case, folder: pathlib.Path) -> Report:
    """Saves version after version, until a rank is killed. All ranks have the same weights and each saves a part."""
    trainer = delta_faults.Trainer(case, group)
    saver = _saver(case, trainer, folder)
    for version in range(1, _VERSIONS + 1):
        if case.together and group is not None:
            dist.barrier(group)
        trainer.step()
        line.tell(("begun", version))
        if rank == case.victim and version == case.version:
            line.strike((case.delay, signal.SIGKILL))
        saver.save()
        line.tell(("done", version))
    return Report()


def _flips(_rank: int, _size: int, _group: Any, _line: Any, case: Case, folder: pathlib.Path) -> Report:
    """Flips one bit of a file or cuts it, many times: load_weights must raise and name the file."""
    trainer, report, draw = delta_faults.Trainer(case), Report(runs=_FLIPS), random.Random(case.seed)
    saver = _saver(case, trainer, folder)
    for _ in range(_VERSIONS):
        trainer.step()
        saver.save()
    files = sorted(file for file in folder.iterdir() if file.stat().st_size)
    for _ in range(_FLIPS):
        file = draw.choice(files)
        whole = file.read_bytes()
        at, cut = draw.randrange(len(whole)), draw.random() < 0.2
        flipped = whole[:at] + bytes([whole[at] ^ 1 << draw.randrange(8)]) + whole[at + 1 :]
        file.write_bytes(whole[:at] if cut else flipped)
        what = f"{file.name} {'cut at' if cut else 'with a flipped bit in byte'} {at} of {len(whole)}"
        try:
            loaded(folder, trainer.weights())
            report.silent.append(f"{what} was loaded")
        except ValueError as error:
            if str(file) not in str(error):
                report.unnamed.append(f"{what}: {error}")
        file.write_bytes(whole)
    if not delta_faults.same(loaded(folder, trainer.weights())[1], trainer.weights()):
        report.silent.append("the files, whole again, make other weights")
    return report


def _fills(_rank: int, _size: int, _group: Any, _line: Any, case: Case, folder: pathlib.Path) -> Report:
    """Saves versions, most of them after filling the disk up to room for a part of the version, or for all of it."""
    trainer, report, draw = delta_faults.Trainer(case), Report(runs=_FILLS), random.Random(case.seed)
    whole = 2 * case.elements + 20_000
    if skipped := small_disk.mount(folder, (case.full_every + 3) * whole):
        return Report(skipped=skipped)
    saver, there = _saver(case, trainer, folder / "weights"), (0, trainer.weights())
    for version in range(1, _FILLS + 1):
        trainer.step()
        left = draw.randrange(draw.choice([5_000, whole])) if draw.random() < 0.8 else small_disk.free(folder)
        with small_disk.filled(folder / "filler", left):
            try:
                saver.save()
                there = (version, trainer.weights())
            except OSError as error:
                if not re.search(r"needs \d+ bytes, and \d+ bytes are free", str(error)):
                    report.unnamed.append(f"version {version}: {error}")
            report.silent += filter(None, [_other(folder / "weights", *there)])
    trainer.step()
    saver.save()
    report.silent += filter(None, [_other(folder / "weights", _FILLS + 1, trainer.weights())])
    if len(names := os.listdir(folder / "weights")) > 1 + case.full_every:
        report.silent.append(f"files that no version needs stay: {sorted(names)}")
    return report


def _other(folder: pathlib.Path, version: int, weights: dict[str, Tensor]) -> str:
    """Returns what is wrong unless `version` loads with these weights; version 0: nothing was saved yet."""
    try:
        found, tensors = loaded(folder, weights)
    except (ValueError, FileNotFoundError) as error:
        return f"version {version} was saved, and nothing loads: {error}" if version else ""
    if found != version:
        return f"version {version} was saved last, and {found} is loaded"
    return "" if delta_faults.same(tensors, weights) else f"version {version} is loaded with other weights"


# -- the check


def _left(_rank: int, _size: int, _group: Any, _line: Any, case: Case, folder: pathlib.Path, done: int) -> str:
    """Returns what is wrong with what killed ranks left, or with the versions of the next job.

    done: the last version that every rank completed."""
    truth = delta_faults.versions(case)
    try:
        version, tensors = loaded(folder, truth[0])
    except (ValueError, FileNotFoundError) as error:
        version, tensors = 0, {}
        if done:
            return f"version {done} was there, and nothing loads: {error}"
    if version < done:
        return f"version {done} was there, and {version} is loaded"
    if version and not delta_faults.same(tensors, truth[version]):
        return f"version {version} is loaded with other weights"
    for name in os.listdir(folder):  # makes the files so old that they count as left behind
        os.utime(folder / name, (1, 1))
    trainer = delta_faults.Trainer(case)
    saver = _saver(case, trainer, folder)
    for own in range(1, 4):
        trainer.step()
        saver.save()
        version, tensors = loaded(folder, truth[0])
        if version != own or not delta_faults.same(tensors, trainer.weights()):
            return f"the next job saved its version {own}, and {version} is loaded"
    wanted = 1 + {2: 2, 3: 1, 100: 3}[case.full_every]
    return "" if len(names := os.listdir(folder)) == wanted else f"what the killed job left stays: {sorted(names)}"


def start(kind: str, number: int, folder: pathlib.Path) -> tuple[Case, World]:
    """Starts one run in `folder`; `judge` tells its outcome."""
    case = Case.of(kind, number)
    (folder / "place").mkdir()
    body = {"kill_weights": _saves, "flip_weights": _flips, "fill_weights": _fills}[kind]
    timeout = _TIMEOUT if case.size > 1 else 0.0
    world = worlds.start(case.size, body, (case, folder / "place"), folder, timeout=timeout)
    world.bound(_BOUND)
    world.on_told = lambda world, rank: world.bound(_BOUND)
    if kind == "kill_weights":
        world.on_end = world.kill  # when one rank ends, the job ends
    return case, world


def judge(case: Case, world: World) -> Outcome:
    """Returns the outcome of a run, after checking the files that killed ranks have left."""
    outcome = Outcome()
    for rank, answer in enumerate(world.answers):
        if answer is None:
            outcome.hung.append(f"rank {rank} did not end")
        elif isinstance(answer, Raised) and case.kind != "kill_weights":
            outcome.crashed.append(answer.trace)
        elif isinstance(answer, Died) and case.kind != "kill_weights":
            outcome.crashed.append(f"rank {rank} ended with status {answer.status}")
        elif isinstance(answer, Report):
            outcome.add(answer)
    if case.kind == "kill_weights" and not outcome.hung:
        done = min(max((v for what, v in rank.told if what == "done"), default=0) for rank in world.ranks)
        place = world.log.parent / "place"
        outcome.silent += filter(None, [str(worlds.call(_left, (case, place, done), world.log.parent))])
        last = world.ranks[case.victim].told[-1:]
        outcome.runs = int(last == [("begun", case.version)])  # else it was killed between two saves
    return outcome
