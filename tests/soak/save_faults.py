"""Faults of checkpoints: saves that are killed, files in which bits flip, full disks, two jobs that save to one folder.

The last complete checkpoint must always load. For a damaged one the error must name the file and the key."""

import pathlib
import random
import re
import signal
import warnings
import zipfile
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from soak import small_disk, worlds
from soak.outcome import Outcome, Report
from soak.worlds import Died, Line, Raised, World
from torch.distributed.checkpoint.api import CheckpointException

import torch_ext

KINDS = {
    "kill_file": "kill -9 in torch_ext.save: runs that lost a checkpoint are silent",
    "kill_background": "kill -9 while an AsyncSaver writes",
    "kill_folder": "kill -9 in torch.distributed.checkpoint.save, 1 to 3 ranks",
    "kill_async": "kill -9 in async_save, 1 to 3 ranks",
    "flip_file": "bit flips and truncations of files",
    "flip_folder": "bit flips and truncations of each file of folders, 1 or 2 ranks",
    "disk_full": "saves to a small tmpfs",
    "two_jobs": "two jobs that save to one place, one of them killed now and then",
}
TIMEOUT = 20.0
_SAVES = 4
_FLIPS = 25
"""Flips in one run; each counts as a run of the kind."""
_BOUND = 40.0
"""Seconds within which a save must be done, on a busy machine."""
_MANY = 100_000


@dataclass(frozen=True)
class Case:
    """What one run does; all of it is drawn from the kind and a number."""

    kind: str
    seed: int
    size: int
    """How many ranks, or jobs."""
    form: str
    """"file" or "folder"."""
    victim: int
    """The rank, or the job, that is killed; -1: none."""
    save: int
    """During which save it is killed."""
    delay: float
    """Seconds from the beginning of that save to the signal."""
    elements: int
    states: str
    """"logical" or "at_rest"."""
    compress: bool

    @classmethod
    def of(cls, kind: str, number: int) -> "Case":
        draw = random.Random(f"{kind} {number}")
        size = {"kill_folder": [1, 1, 2, 3], "kill_async": [1, 2, 3], "flip_folder": [1, 2], "two_jobs": [2]}
        chosen = draw.choice(size.get(kind, [1]))
        form = "file" if kind.endswith(("_file", "_background")) else draw.choice(["file", "folder"])
        form = "folder" if kind in ("kill_folder", "kill_async", "flip_folder") else form
        killed = kind.startswith("kill") or (kind == "two_jobs" and draw.random() < 0.5)
        delay = draw.random() ** 2 * (0.03 if form == "file" else 0.06) * (1 if kind != "kill_async" else 3)
        return cls(
            kind,
            draw.randrange(1 << 30),
            chosen,
            form,
            draw.randrange(chosen) if killed else -1,
            draw.randrange(1, _SAVES),
            delay,
            draw.choice([100, 5_000, 200_000]),
            draw.choice(["logical", "at_rest", "at_rest"]),
            draw.random() < 0.7,
        )


def state(seed: int, elements: int) -> dict[str, Any]:
    """Returns tensors and plain values, all of which depend on the seed."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(elements, generator=generator).view(2, -1)
    return {
        "model": {"weight": values.to(torch.bfloat16), "bias": torch.full((7,), float(seed))},
        "optimizer": {
            "state": {"weight": {"exp_avg": values * 0.5, "master_param": values}},  # rounds to model.weight
            "param_groups": {"0": {"lr": seed / 8, "steps": [seed, seed + 1], "param_id": [1]}},
        },
        "step": seed,
    }


def blank(value: Any) -> Any:
    """Returns the same keys, with zeros for tensors and None for other values."""
    if isinstance(value, dict):
        return {key: blank(each) for key, each in value.items()}
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else None


def same(a: Any, b: Any) -> bool:
    """Whether two states have the same keys, types, dtypes and values."""
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and a == b


class Place:
    """The file or the folder that checkpoints are saved to."""

    def __init__(self, case: Case, folder: pathlib.Path, rank: int = 0, group: Any = None) -> None:
        self.case, self.rank, self.group = case, rank, group
        self.path = folder / ("checkpoint.pt" if case.form == "file" else "checkpoint")

    def state(self, seed: int) -> dict[str, Any]:
        """Returns the whole state of a save. In a folder with ranks each rank has a part of its own, too."""
        found = state(seed, self.case.elements)
        if self.case.form == "folder" and self.group is not None:
            found |= {f"rank {r}": state(_MANY * (r + 1) + seed, 10) for r in range(self.case.size)}
        return found

    def save(self, seed: int) -> None:
        """Saves this rank's part of a state, in the way of the case's kind."""
        mine = {key: value for key, value in self.state(seed).items() if key in (f"rank {self.rank}", *state(0, 2))}
        options: Any = {"states": self.case.states, "compress": self.case.compress}
        if self.case.kind == "kill_background":
            with torch_ext.AsyncSaver(**options) as saver:
                saver.save(mine, self.path)
            return
        if self.case.form == "file":
            torch_ext.save(mine, self.path, **options)
            return
        writer = torch_ext.CheckpointWriter(self.path, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if self.case.kind == "kill_async":
                future: Any = dcp.async_save(mine, storage_writer=writer, process_group=self.group)
                future.result()
            else:
                dcp.save(mine, storage_writer=writer, process_group=self.group, no_dist=self.group is None)

    def load(self) -> dict[str, Any]:
        if self.case.form == "file":
            return dict(torch_ext.load(self.path))
        target = blank(self.state(1))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(target, storage_reader=torch_ext.CheckpointReader(self.path), no_dist=True)
        return dict(target)

    def holds(self, seeds: "set[int]") -> str:
        """Returns what is wrong, "" if nothing is.

        One of the states `seeds` must load, and the next save must work and leave no other files."""
        try:
            found = self.load()
        except Exception as error:
            return f"no checkpoint loads: {_text(error)}"
        if found["step"] not in seeds or not same(found, self.state(found["step"])):
            return f"state {found['step']} was loaded, and not one of {sorted(seeds)} whole"
        alone = Place(self.case, self.path.parent)
        alone.save(77)
        if not same(alone.load(), alone.state(77)):
            return "the next save is not what is loaded"
        left = sorted(p.name for p in (self.path.parent if self.case.form == "file" else self.path).iterdir())
        wanted = 1 if self.case.form == "file" else 3
        return "" if len(left) == wanted else f"the next save left {left}"


def _text(error: BaseException) -> str:
    """Returns an error's text; for torch.distributed.checkpoint's CheckpointException the texts of its causes."""
    if isinstance(error, CheckpointException):
        return "; ".join(str(cause) for cause, _ in error.failures.values())
    return str(error)


# -- the processes


def _saves(rank: int, _size: int, group: Any, line: Line, case: Case, folder: pathlib.Path) -> Report:
    """Saves state after state, until it is killed."""
    place, report = Place(case, folder / "place", rank, group), Report()
    first = rank * 1000 if case.kind == "two_jobs" else 0
    draw = random.Random(case.seed + rank)
    for i in range(_SAVES):
        line.tell(("begun", first + i))
        if rank == case.victim and i == case.save:
            line.strike((case.delay, signal.SIGKILL))
        try:
            place.save(first + i)
        except (RuntimeError, CheckpointException) as error:
            if case.kind != "two_jobs":
                raise
            if not re.search("is being saved to by|another save", _text(error)):
                report.unnamed.append(f"a save beside another one: {_text(error)}")
            continue
        line.tell(("done", first + i))
        if case.kind == "two_jobs":
            torch.randn(draw.randrange(1, 200_000))  # takes a while
    return report


def _checks(
    _rank: int, _size: int, _group: Any, _line: Any, case: Case, folder: pathlib.Path, seeds: "set[int]", grouped: bool
) -> str:
    """Runs `Place.holds` in a process of its own."""
    return Place(case, folder / "place", 0, True if grouped else None).holds(seeds)


def _flips(rank: int, size: int, group: Any, _line: Any, case: Case, folder: pathlib.Path) -> Report:
    """Flips one bit of a file or cuts it, many times: load must give what was saved, or raise and name the file.

    If the bit is inside of an item, the error must name its key, too."""
    place = Place(case, folder / "place", rank, group)
    place.save(1)
    report = Report(runs=_FLIPS)
    if rank != 0:
        return report
    draw = random.Random(case.seed)
    files = [place.path] if case.form == "file" else sorted(p for p in place.path.iterdir() if p.name != ".lock")
    for _ in range(_FLIPS):
        file = draw.choice(files)
        whole = file.read_bytes()
        at = draw.randrange(len(whole))
        cut = draw.random() < 0.2
        damaged = whole[:at] if cut else whole[:at] + bytes([whole[at] ^ 1 << draw.randrange(8)]) + whole[at + 1 :]
        what = f"{file.name} {'cut at' if cut else 'with a flipped bit in byte'} {at} of {len(whole)}"
        key = "" if cut else _key_at(place, file, at)
        file.write_bytes(damaged)
        try:
            if not same(place.load(), place.state(1)):
                report.silent.append(f"{what}: another state was loaded")
        except (ValueError, CheckpointException) as error:
            if str(file) not in _text(error) or key not in _text(error):
                report.unnamed.append(f"{what}: {key!r} of {file} is not named: {_text(error)}")
        file.write_bytes(whole)
    if not same(place.load(), place.state(1)):
        report.silent.append("the file, whole again, is another one")
    return report


def _key_at(place: Place, file: pathlib.Path, at: int) -> str:
    """Returns the key (of a folder) or the zip record (of a file) whose bytes include byte `at`; "" if none does."""
    if place.case.form == "file":
        with zipfile.ZipFile(file) as archive, open(file, "rb") as raw:
            for info in archive.infolist():
                raw.seek(info.header_offset + 26)
                lengths = raw.read(4)
                begin = info.header_offset + 30 + int.from_bytes(lengths[:2], "little")
                begin += int.from_bytes(lengths[2:], "little")
                if begin <= at < begin + info.file_size:
                    return info.filename.split("/", 1)[1]
        return ""
    stored = dcp.FileSystemReader(place.path).read_metadata().storage_data
    inside = [i for i, info in stored.items() if info.relative_path == file.name]
    return next((i.fqn for i in inside if stored[i].offset <= at < stored[i].offset + stored[i].length), "")


def _fills(_rank: int, _size: int, _group: Any, _line: Any, case: Case, folder: pathlib.Path) -> Report:
    """Saves to a disk with little free space: an error must say how much is missing, and the last state must load."""
    place, report = Place(case, folder / "place"), Report()
    draw = random.Random(case.seed)
    if skipped := small_disk.mount(folder / "place", 22 * case.elements + 500_000):
        return Report(skipped=skipped)
    place.save(1)
    allowed = {1}
    with small_disk.filled(folder / "place" / "filler", draw.randrange(11 * case.elements + 30_000)):
        try:
            place.save(2)
            allowed = {2}
        except (OSError, CheckpointException) as error:
            if not re.search(r"needs? (more than )?\d+ bytes", _text(error)):
                report.unnamed.append(f"a full disk: {_text(error)}")
        if (found := place.load())["step"] not in allowed or not same(found, place.state(found["step"])):
            report.silent.append(f"after a save to a full disk state {found['step']} is loaded, and not {allowed}")
    if wrong := place.holds(allowed):
        report.silent.append(wrong)
    return report


# -- starting a run, and its outcome


def start(kind: str, number: int, folder: pathlib.Path) -> tuple[Case, World]:
    """Starts one run in `folder`; `judge` tells its outcome."""
    case = Case.of(kind, number)
    (folder / "place").mkdir()
    body = {"flip": _flips, "disk": _fills}.get(kind.split("_")[0], _saves)
    grouped = case.form == "folder" and (case.size > 1 or kind == "kill_async") and kind != "two_jobs"
    world = worlds.start(case.size, body, (case, folder), folder, timeout=TIMEOUT if grouped else 0.0)

    world.bound(_BOUND)
    world.on_told = lambda world, rank: world.bound(_BOUND)
    if case.victim >= 0 and kind != "two_jobs":
        world.on_end = world.kill  # when one rank ends, the job ends
    return case, world


def judge(case: Case, world: World) -> Outcome:
    """Returns the outcome of a run, after checking the checkpoint that killed jobs have left."""
    outcome = Outcome(runs=0)
    for rank, answer in enumerate(world.answers):
        if answer is None:
            outcome.hung.append(f"process {rank} did not end")
        elif isinstance(answer, Raised):
            if case.victim < 0 or case.kind == "two_jobs":
                outcome.crashed.append(f"process {rank} raised {answer.trace}")
        elif isinstance(answer, Died):
            if case.victim < 0 or (case.kind == "two_jobs" and rank != case.victim):
                outcome.crashed.append(f"process {rank} ended with status {answer.status}")
        else:
            outcome.add(answer)
    outcome.runs = max(outcome.runs, 1)
    if case.kind.startswith("kill") and world.ranks[case.victim].told[-1:][0][0] != "begun":
        outcome.runs = 0  # it was killed between two saves
    if case.kind.startswith("kill") or case.kind == "two_jobs":
        outcome.silent += filter(None, [_lost(case, world)])
    return outcome


def _lost(case: Case, world: World) -> str:
    """Returns what is wrong with the checkpoint that killed jobs left."""
    said = [[told for told in rank.told if told[0] == what] for what in ("begun", "done") for rank in world.ranks]
    begun = {seed for told in said[: case.size] for _, seed in told}
    done = [[seed for _, seed in told] for told in said[case.size :]]
    if case.kind == "two_jobs":
        # The order of two jobs' last complete saves is not known. The killed job's last save may be there, too.
        legal = {max(seeds) for seeds in done if seeds}
        legal |= {seed for seed in begun if seed // 1000 == case.victim and seed >= max(done[case.victim], default=0)}
    else:  # a save that is complete on one rank is complete
        latest = max((seed for seeds in done for seed in seeds), default=-1)
        legal = {seed for seed in begun if seed >= latest}
    if not any(done):
        return ""  # no save was complete, so there may be no checkpoint
    grouped = case.size > 1 or case.kind == "kill_async"
    args = (case, world.log.parent, legal, grouped and case.kind != "two_jobs")
    return str(worlds.call(_checks, args, world.log.parent))
