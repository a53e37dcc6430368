"""Faults of ranks at random moments of a training.

Every other rank must end within its time limit, with the right weights or with an error that names the faulty rank."""

import contextlib
import random
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from soak import counted_model
from soak.counted_model import BLOCKS, OPTIONS, Model, UserError
from soak.outcome import Outcome
from soak.worlds import Died, Line, Raised, Rank, World
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torch_ext

STRATEGIES = ["no_shard", "optim", "optim_grads", "optim_grads_params", "ddp_hook"]
TIMEOUT = 3.0  # of the process group
STEPS = 6
_ALLOWANCE = 15.0
"""Seconds that a busy machine may take, in addition to the time-outs, until every rank has ended."""

_LASTS = {"stop": 2 * TIMEOUT, "pause": 0.1 * TIMEOUT}
"""Seconds for which the victim is stopped."""

# By kind: what it is, and whether the victim's process ends by it.
KINDS: dict[str, tuple[str, bool]] = {
    "kill": ("kill -9", True),
    "stop": ("SIGSTOP until past the time-out, then SIGCONT", False),
    "pause": ("SIGSTOP for a moment", False),
    "interrupt": ("Ctrl-C, which ends it", True),
    "interrupt_all": ("Ctrl-C on all ranks, which go on", False),
    "forward": ("an exception in forward, which ends it", True),
    "backward": ("an exception in backward, which ends it", True),
    "hook": ("an exception in a user's hook, which ends it", True),
    "alone": ("an exception on one rank, which goes on with its next batch", False),
    "everywhere": ("the same exception on all ranks, which go on", False),
}


@dataclass(frozen=True)
class Case:
    """What one run does; all of it is drawn from the kind and a number."""

    kind: str
    strategy: str
    size: int
    victim: int
    step: int
    """The step in which the fault happens; -1: in parallelize."""
    delay: float
    """Seconds from the beginning of that step to the signal; 0 for exceptions."""
    block: int
    where: str
    """Where an exception is raised: "forward", "backward", "forward_hook" or "backward_hook"."""
    wire: str
    store: str
    bucket_size: int

    @classmethod
    def of(cls, kind: str, number: int) -> "Case":
        draw = random.Random(f"{kind} {number}")
        # Not "ddp_hook" where training must go on: DDP itself cannot always, and our hook has no part in that.
        strategy = draw.choice(STRATEGIES[: 4 if kind in ("alone", "everywhere", "interrupt_all") else 5])
        size = draw.choice([2, 2, 3, 4])
        by_signal = kind in ("kill", "stop", "pause", "interrupt", "interrupt_all")
        # For ddp_hook no earlier step: DDP's constructor, and its rebuild of the buckets before the second step, raise
        # torch's own errors, which name no rank.
        first = 2 if strategy == "ddp_hook" else -1 if kind in ("kill", "stop") else 0
        where = {"forward": ["forward"], "backward": ["backward"], "hook": ["forward_hook", "backward_hook"]}
        return cls(
            kind,
            strategy,
            size,
            draw.randrange(size),
            draw.randrange(first, STEPS),
            draw.random() ** 2 * 0.05 if by_signal else 0.0,
            draw.randrange(1, len(BLOCKS)),
            draw.choice(where.get(kind, ["forward", "backward", "forward_hook", "backward_hook"])),
            draw.choice(["fp32", "bf16", "bf16 compressed"]),
            draw.choice(["file", "tcp"]),
            draw.choice([1, 300, 40_000_000]),
        )


@dataclass
class Report:
    """A rank's answer."""

    parallelized: bool = False
    steps: int = 0
    """How many steps it claims to have completed."""
    wrong: int = -1
    """The first of these steps after which its weights differ from plain torch's; -1: none."""
    error: str = ""
    error_again: str = ""
    seconds: float = 0.0
    """How long the call took that raised."""


class Trainer:
    """The model of counted_model.py under a strategy, and its optimizer."""

    def __init__(self, case: Case, group: Any) -> None:
        ddp: dict[str, Any] = {"grad_comm_dtype": case.wire.split()[0], "bucket_size": case.bucket_size}
        ddp |= {"grad_comm_compression": "on" if "compressed" in case.wire else "off", "overlap_grad_reduce": True}
        policy = torch_ext.load_policy(torch.float32, override_ddp_config=ddp)
        self.inner = Model()
        self.model: nn.Module = self.inner
        if case.strategy == "ddp_hook":
            wrapped = DistributedDataParallel(self.inner, process_group=group, bucket_cap_mb=case.bucket_size / 2**20)
            torch_ext.register_comm_hook(wrapped, policy)
            self.model = wrapped
        else:
            torch_ext.parallelize(self.model, policy, strategy=case.strategy, process_group=group)
        self.optimizer = torch_ext.AdamW(self.model.parameters(), policy=policy, **OPTIONS)

    def step(self, grads: list[torch.Tensor]) -> None:
        self.model(grads).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @contextlib.contextmanager
    def raising(self, case: Case) -> Any:
        """Within the context, user code in the case's block raises."""
        block: Any = self.inner.blocks[case.block]
        handle = None
        if case.where == "forward":
            block.before = _raise
        elif case.where == "backward":
            block.behind = _raise
        elif case.where == "forward_hook":
            handle = block.register_forward_hook(_raise)
        else:
            handle = block.register_full_backward_hook(_raise)
        try:
            yield
        finally:
            block.before = block.behind = None
            if handle is not None:
                handle.remove()


def _raise(*_: Any) -> None:
    raise UserError("of the user")


def train(rank: int, size: int, group: Any, line: Line, case: Case) -> Report:
    """The body of a rank: trains, with the case's fault, and reports."""
    report, weights = Report(), list[list[torch.Tensor]]()
    begin = time.monotonic()
    trainer: Trainer | None = None
    try:
        _begins(line, case, rank, -1)
        trainer = Trainer(case, group)
        report.parallelized = True
        for batch in range(STEPS):
            begin = time.monotonic()
            if _survives(trainer, case, rank, size, batch, line):
                weights.append(counted_model.local_weights(trainer.inner))
    except KeyboardInterrupt:  # between two steps
        if case.kind != "interrupt_all":
            raise
        report.error = report.error_again = "Ctrl-C between two steps"
    except RuntimeError as error:
        report.error, report.seconds = str(error), time.monotonic() - begin
        if trainer is not None:
            report.error_again = _again(trainer, rank, size)
    report.steps = len(weights)
    if case.kind != "interrupt_all":
        wanted = counted_model.expected(tuple(_batches(case, size)[: len(weights)]))
        pairs = zip(weights, wanted, strict=True)
        report.wrong = next(
            (i for i, (mine, whole) in enumerate(pairs) if not counted_model.right(mine, whole, rank, size)), -1
        )
    return report


def _begins(line: Line, case: Case, rank: int, step: int) -> None:
    """Tells the driver that the step of the fault begins, and requests the signal if this rank is to get one."""
    if step != case.step:
        return
    line.tell(step)
    if rank != case.victim and case.kind != "interrupt_all":
        return
    first = {"kill": signal.SIGKILL, "interrupt": signal.SIGINT, "interrupt_all": signal.SIGINT}.get(case.kind)
    if case.kind in _LASTS:
        line.strike((case.delay, signal.SIGSTOP), (_LASTS[case.kind], signal.SIGCONT))
    elif first is not None:
        line.strike((case.delay, first))


def _survives(trainer: Trainer, case: Case, rank: int, size: int, batch: int, line: Line) -> bool:
    """Takes one step. Returns whether it was completed.

    The planned exception, or Ctrl-C, ends the step. It ends the process, too, unless training goes on in this kind."""
    planned = not case.delay and batch == case.step and (rank == case.victim or case.kind == "everywhere")
    try:
        _begins(line, case, rank, batch)
        with trainer.raising(case) if planned else contextlib.nullcontext():
            trainer.step(counted_model.gradients(batch, rank, size))
        return True
    except UserError:
        if case.kind not in ("alone", "everywhere"):
            raise
    except KeyboardInterrupt:
        if case.kind != "interrupt_all":
            raise
    trainer.optimizer.zero_grad()
    return False


def _again(trainer: Trainer, rank: int, size: int) -> str:
    """Returns the error of one more step after an error; "" if it succeeds."""
    try:
        trainer.step(counted_model.gradients(99, rank, size))
    except RuntimeError as error:
        return str(error)
    return ""


def _batches(case: Case, size: int) -> list[tuple[int, ...]]:
    """Returns for each step the batch of each rank. A rank on which a batch raised continues with the next batch."""
    skips = {"everywhere": set(range(size)), "alone": {case.victim}}.get(case.kind, set())
    each = [[b for b in range(STEPS) if not (r in skips and b == case.step)] for r in range(size)]
    return list(zip(*each, strict=False))


def on_told(case: Case) -> Callable[[World, Rank], None]:
    """Returns a World.on_told that sets the time limit when the fault begins."""

    def told(world: World, rank: Rank) -> None:
        if rank.number == case.victim:
            # Each may take one time-out in the failed call, half of one to ask the others, and the same in the next.
            world.bound(case.delay + _LASTS.get(case.kind, 0.0) + 3 * TIMEOUT + _ALLOWANCE)

    return told


def judge(case: Case, world: World) -> Outcome:
    """Returns the outcome of a run; hung, silent, unnamed and crashed are explained in __main__.py."""
    outcome = Outcome()
    gone = KINDS[case.kind][1]
    for rank, answer in enumerate(world.answers):
        who = f"rank {rank} of {case.size}"
        if answer is None:
            outcome.hung.append(f"{who} did not end")
        elif isinstance(answer, Died) and not (gone and rank == case.victim):
            outcome.crashed.append(f"{who} ended with status {answer.status}")
        elif isinstance(answer, Raised) and not (gone and rank == case.victim):
            outcome.crashed.append(f"{who} raised {answer.trace}")
        elif isinstance(answer, Report):
            _judge_report(case, rank, who, answer, outcome)
    return outcome


def _judge_report(case: Case, rank: int, who: str, report: Report, outcome: Outcome) -> None:
    """Adds to the outcome what is wrong with a rank's report."""
    outcome.seconds = max(outcome.seconds, report.seconds)
    if report.wrong >= 0:
        outcome.silent.append(
            f"{who}: wrong weights after step {report.wrong} of {report.steps}; said {report.error!r}"
        )
    if not report.error:
        wanted = STEPS - (case.kind == "everywhere" or (case.kind == "alone" and rank == case.victim))
        if report.steps < wanted and case.kind != "interrupt_all":
            outcome.silent.append(f"{who}: {report.steps} steps of {wanted}, and no error")
        return
    if case.step >= 0 and not report.parallelized:  # a busy machine let the ranks start more than a time-out apart
        outcome.crashed.append(f"{who}: an error before anything was done: {report.error}")
        return
    if case.kind in ("pause", "everywhere"):
        outcome.crashed.append(f"{who}: an error where there is nothing wrong: {report.error}")
    if case.step >= 0 and not report.error_again:
        outcome.silent.append(f"{who}: the step after an error succeeded: {report.error}")
    if rank != case.victim and case.kind != "interrupt_all" and not names(report.error, case.victim):
        outcome.unnamed.append(f"{who}: rank {case.victim} is not named: {report.error}")
    if gone_wrong := wrongly_lost(report.error, case, rank):
        outcome.unnamed.append(f"{who}: {gone_wrong} is not lost: {report.error}")


def names(message: str, rank: int) -> bool:
    """Whether the message names this rank."""
    return any(str(rank) in re.findall(r"\d+", found) for found in re.findall(r"\branks? (\d+(?:, \d+)*)", message))


def wrongly_lost(message: str, case: Case, rank: int) -> str:
    """Returns the ranks that a message calls lost although they had no fault."""
    if "lost, " not in message or "no rank is lost" in message:
        return ""
    found = re.search(r"\branks? (\d+(?:, \d+)*) did not respond", message)
    named = set(found[1].split(", ")) if found else set()
    legal = {str(case.victim)} if rank != case.victim else {str(r) for r in range(case.size)}
    return ", ".join(sorted(named - legal)) if case.kind != "interrupt_all" else ""
