"""Faults of weight updates: publishers and engines are killed, bits flip in deltas.

An engine must always have the weights of one version, or get an error that says what to do."""

import os
import pathlib
import random
import re
import signal
from dataclasses import dataclass
from typing import Any

import torch
from soak import worlds
from soak.outcome import Outcome, Report
from soak.worlds import Died, Line, Raised, World
from torch import Tensor, nn

import torch_ext

KINDS = {
    "kill_publish": "kill -9 in WeightPublisher.publish and full",
    "kill_apply": "kill -9 in WeightSubscriber.apply, on weights that stay",
    "flip_delta": "bit flips and truncations of parts: deltas, merged ones, all weights",
}
_VERSIONS = 5
_FLIPS = 25
"""Flips in one run; each counts as a run of the kind."""
_BOUND = 40.0
"""Seconds until a version must be there, on a busy machine."""


@dataclass(frozen=True)
class Case:
    """What one run does; all of it is drawn from the kind and a number."""

    kind: str
    seed: int
    elements: int
    exact: bool
    sliceable: bool
    version: int
    """During which version the process is killed; 0: never."""
    delay: float
    """Seconds from the beginning of that version to the signal."""
    verify: str

    @classmethod
    def of(cls, kind: str, number: int) -> "Case":
        draw = random.Random(f"{kind} {number}")
        elements = draw.choice([300, 20_000, 1_000_000] if kind != "flip_delta" else [300, 3_000])
        return cls(
            kind,
            draw.randrange(1 << 30),
            elements,
            draw.random() < 0.5,
            draw.random() < 0.3,
            draw.randrange(1, _VERSIONS + 1) if kind.startswith("kill") else 0,
            draw.random() ** 2 * (0.001 + elements * 5e-9),
            draw.choice(["touched", "full"]),
        )


class Trainer:
    """A small training with a WeightPublisher. It has the same weights at a version whenever it is created."""

    def __init__(self, case: Any, group: Any = None) -> None:
        """case: this module's Case, or another one with seed, elements, exact and sliceable."""
        self.draw = torch.Generator().manual_seed(case.seed)
        self.model = nn.Module()
        for name, size in (("large", case.elements), ("small", 7), ("norm", 130)):
            values = torch.randn(size, generator=self.draw) * 0.02
            self.model.register_parameter(
                name, nn.Parameter(values.to(torch.float32 if name == "norm" else torch.bfloat16))
            )
        self.model.register_parameter("frozen", nn.Parameter(torch.ones(40), requires_grad=False))
        self.optimizer = torch_ext.AdamW(self.model.named_parameters(), lr=1e-4)
        self.publisher = torch_ext.WeightPublisher(
            self.model, self.optimizer, exact=case.exact, sliceable=case.sliceable, process_group=group
        )

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def step(self) -> None:
        for p in self.model.parameters():
            if p.requires_grad:
                p.grad = torch.randn(p.shape, generator=self.draw).to(p.dtype)
        self.optimizer.step()


def versions(case: Any) -> list[dict[str, Tensor]]:
    """Returns the weights of each version, from 0 on."""
    trainer = Trainer(case)
    found = [trainer.weights()]
    for _ in range(_VERSIONS):
        trainer.step()
        found.append(trainer.weights())
    return found


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Whether both have the same names and equal tensors."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def refused(subscriber: torch_ext.WeightSubscriber, parts: Any, verify: Any = "touched") -> str:
    """Applies the parts and returns the error's text; "" if they were applied."""
    try:
        subscriber.apply(parts, verify)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


# -- the processes


def _publishes(_rank: int, _size: int, _group: Any, line: Line, case: Case, folder: pathlib.Path) -> Report:
    """Publishes version after version into files, until it is killed."""
    trainer = Trainer(case)
    for version in range(1, _VERSIONS + 1):
        trainer.step()
        line.tell(("begun", version))
        if version == case.version:
            line.strike((case.delay, signal.SIGKILL))
        for name, part in ((f"delta{version}", trainer.publisher.publish()), ("full", trainer.publisher.full())):
            (folder / "new").write_bytes(part)
            os.replace(folder / "new", folder / name)
        line.tell(("done", version))
    return Report()


def _applies(_rank: int, _size: int, _group: Any, line: Line, case: Case, folder: pathlib.Path) -> Report:
    """Applies version after version to weights in mapped files, which outlive the process, until it is killed."""
    trainer = Trainer(case)
    engine = mapped(trainer.weights(), folder)
    for name, values in trainer.weights().items():
        engine[name].copy_(values)
    for version in range(1, _VERSIONS + 1):
        trainer.step()
        (folder / f"delta{version}").write_bytes(trainer.publisher.publish())
        (folder / f"full{version}").write_bytes(trainer.publisher.full())
    subscriber = torch_ext.WeightSubscriber(engine)
    for version in range(1, _VERSIONS + 1):
        part = (folder / f"delta{version}").read_bytes()
        line.tell(("begun", version))
        if version == case.version:
            line.strike((case.delay, signal.SIGKILL))
        subscriber.apply(part, case.verify)  # type: ignore[arg-type]
        line.tell(("done", version))
    return Report()


def mapped(like: dict[str, Tensor], folder: pathlib.Path) -> dict[str, Tensor]:
    """Returns tensors in files, which stay when their process is killed."""
    return {
        name: torch.from_file(str(folder / f"{name}.bin"), True, t.numel(), dtype=t.dtype) for name, t in like.items()
    }


def _flips(_rank: int, _size: int, _group: Any, _line: Any, case: Case, _folder: pathlib.Path) -> Report:
    """Flips one bit of a message or cuts it, many times: apply must raise, name the damage and change no weight."""
    trainer, report, draw = Trainer(case), Report(runs=_FLIPS), random.Random(case.seed)
    begin = trainer.weights()
    trainer.step()
    first, at_first = trainer.publisher.publish(), trainer.weights()
    whole = trainer.publisher.full()
    trainer.step()
    merged, at_second = torch_ext.merge_deltas([first, trainer.publisher.publish()]), trainer.weights()
    parts = {"delta": (first, at_first), "full": (whole, at_first), "merged": (merged, at_second)}
    for _ in range(_FLIPS):
        kind = draw.choice(list(parts))
        part, wanted = parts[kind]
        at, cut = draw.randrange(len(part)), draw.random() < 0.2
        damaged = part[:at] if cut else part[:at] + bytes([part[at] ^ 1 << draw.randrange(8)]) + part[at + 1 :]
        what = f"{kind} {'cut at' if cut else 'with a flipped bit in byte'} {at} of {len(part)}"
        engine = {name: t.clone() for name, t in begin.items()}
        subscriber = torch_ext.WeightSubscriber(engine)
        error = refused(subscriber, damaged, case.verify)
        if not error:
            report.silent.append(f"{what} was applied")
        elif not same(engine, begin) or subscriber.version != 0:
            report.silent.append(f"{what} changed weights, and was refused: {error}")
        elif not re.search("damaged|cut off|has format", error):
            report.unnamed.append(f"{what}: {error}")
        subscriber.apply(part)
        if not same(engine, wanted):
            report.silent.append(f"{kind}, whole again, makes other weights")
    return report


# -- the checks


def _after_publish(_rank: int, _size: int, _group: Any, _line: Any, case: Case, folder: pathlib.Path, done: int) -> str:
    """Returns what is wrong with a killed publisher's files, or with an engine's reaction to the next publisher."""
    weights, files = versions(case), sorted(folder.glob("delta*"))
    if len(files) not in (done, done + 1):
        return f"{len(files)} deltas, of {done} that were there"
    engine = {name: t.clone() for name, t in weights[0].items()}
    subscriber = torch_ext.WeightSubscriber(engine)
    for version, file in enumerate(files, 1):
        subscriber.apply(file.read_bytes(), case.verify)  # type: ignore[arg-type]
        if not same(engine, weights[version]) or subscriber.version != version:
            return f"{file.name} makes other weights"
    restarted = Trainer(case)  # a restarted trainer, whose publisher begins a new chain of deltas
    restarted.step()
    error = refused(subscriber, restarted.publisher.publish())
    if files and not re.search("chain|trainer|publisher", error):  # without files the engine follows no publisher yet
        return "the delta of a restarted publisher is not rejected by name"
    subscriber.apply(restarted.publisher.full())
    return "" if same(engine, restarted.weights()) else "full() of a restarted publisher makes other weights"


def _after_apply(_rank: int, _size: int, _group: Any, _line: Any, case: Case, folder: pathlib.Path, done: int) -> str:
    """Returns what is wrong with a killed engine's weights, or with the errors of an engine that resumes from them.

    done: the last version that was applied completely."""
    weights = versions(case)
    engine = mapped(weights[0], folder)
    next_version = min(done + 1, _VERSIONS)
    for name, t in engine.items():
        if not ((t == weights[done][name]) | (t == weights[next_version][name])).all():
            return f"{name} has values of neither version {done} nor {next_version}"
    deltas = [(folder / f"delta{version}").read_bytes() for version in range(1, next_version + 1)]
    subscriber = torch_ext.WeightSubscriber(engine)
    if not refused(subscriber, deltas, "full") and not same(engine, weights[next_version]):
        return "deltas of weights that are not there were applied"
    if next_version > 1 and not re.search("version", refused(torch_ext.WeightSubscriber(engine), deltas[1:])):
        return "a delta that does not follow is not rejected by name"
    subscriber.apply((folder / f"full{next_version}").read_bytes(), case.verify)  # type: ignore[arg-type]
    return "" if same(engine, weights[next_version]) else "all weights of a version make other weights"


def start(kind: str, number: int, folder: pathlib.Path) -> tuple[Case, World]:
    """Starts one run in `folder`; `judge` tells its outcome."""
    case = Case.of(kind, number)
    (folder / "place").mkdir()
    body = {"kill_publish": _publishes, "kill_apply": _applies, "flip_delta": _flips}[kind]
    world = worlds.start(1, body, (case, folder / "place"), folder)
    world.bound(_BOUND)
    world.on_told = lambda world, rank: world.bound(_BOUND)
    return case, world


def judge(case: Case, world: World) -> Outcome:
    """Returns the outcome of a run, after checking what a killed process has left."""
    outcome = Outcome()
    (answer,) = world.answers
    if answer is None:
        outcome.hung.append("it did not end")
    elif isinstance(answer, Raised):
        outcome.crashed.append(answer.trace)
    elif isinstance(answer, Died) and not case.version:
        outcome.crashed.append(f"it ended with status {answer.status}")
    elif case.version:
        outcome.silent += filter(None, [_left(case, world)])
        outcome.runs = int(world.ranks[0].told[-1:] == [("begun", case.version)])  # else it was killed between versions
    else:
        outcome.add(answer)
    return outcome


def _left(case: Case, world: World) -> str:
    """Returns what is wrong with what a killed process left."""
    done = max((version for what, version in world.ranks[0].told if what == "done"), default=0)
    after = _after_publish if case.kind == "kill_publish" else _after_apply
    if not world.ranks[0].told:
        return ""  # it was killed before it began
    folder = world.log.parent
    return str(worlds.call(after, (case, folder / "place", done), folder))
