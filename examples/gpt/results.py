"""The results of the main job, as in OUT/results.json: read from the logs of train.py, with the table's statistics.

Differences are given in units of the spread: the sample standard deviation of fp32's held-out loss over its seeds.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import text
import torch
from configurations import CONFIGURATIONS, MORE
from stages import FULL, QUICK

REFERENCE = "torch-fp32"
COMPARED = ("finetune", "scratch")


@dataclass(frozen=True)
class Result:
    """One run. Losses are nats per byte; bytes are per parameter."""

    configuration: str
    seed: int
    held_out: float
    previews: list[tuple[int, float]]  # step, loss of a tenth of the held-out text
    memory: dict[str, float]  # bytes held between steps, by kind
    sent: float | None  # per step, by rank 0; None: one process, or the kernel does not say
    resumed_at: int  # the step after which a new process resumed; 0: not resumed


@dataclass(frozen=True)
class StageResults:
    steps: int
    peak_lr: float
    bytes_per_step: int
    processes: int
    parameters: int
    held_out_bytes: int
    runs: list[Result]

    def of(self, configuration: str) -> list[Result]:
        return [run for run in self.runs if run.configuration == configuration]

    def configurations(self) -> list[str]:
        """Returns the names of the configurations that ran, in the table's order."""
        return [name for name in CONFIGURATIONS | MORE if self.of(name)]

    def mean(self, configuration: str) -> float:
        return statistics.fmean(run.held_out for run in self.of(configuration))

    def excess(self, configuration: str) -> float:
        """Returns the mean over the seeds of the held-out loss minus fp32's of the same seed."""
        fp32 = {run.seed: run.held_out for run in self.of(REFERENCE)}
        return statistics.fmean(run.held_out - fp32[run.seed] for run in self.of(configuration))

    def spread(self) -> float:
        return statistics.stdev(run.held_out for run in self.of(REFERENCE))

    def memory(self, configuration: str) -> float:
        return sum(self.of(configuration)[0].memory.values())


@dataclass(frozen=True)
class Results:
    machine: str
    command: str
    stages: dict[str, StageResults]

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @staticmethod
    def load(path: Path) -> Results:
        read = json.loads(path.read_text())
        for stage in read["stages"].values():
            stage["runs"] = [Result(**run) for run in stage["runs"]]
        read["stages"] = {name: StageResults(**stage) for name, stage in read["stages"].items()}
        return Results(**read)


def collect(out: Path) -> Results:
    """Reads the logs of a whole job."""
    stages = {name: _stage(name, sorted((out / name).glob("*.jsonl"))) for name in COMPARED}
    quick = " --quick" if stages["scratch"].steps == QUICK["scratch"].steps else ""
    return Results(_machine(), f"bash examples/run.sh{quick}", stages)


def _stage(name: str, logs: Sequence[Path]) -> StageResults:
    if not logs:
        raise SystemExit(f"no logs of the stage {name}: it did not run, or into another folder")
    runs, ends = [], []
    for path in logs:
        run, end = _run(path)
        runs.append(run)
        ends.append(end)
    sizes = next(stages[name] for stages in (FULL, QUICK) if stages[name].steps == ends[0]["until"])
    return StageResults(
        steps=sizes.steps,
        peak_lr=sizes.peak_lr,
        bytes_per_step=ends[0]["world"] * sizes.batch * sizes.config.context,
        processes=ends[0]["world"],
        parameters=ends[0]["parameters"],
        held_out_bytes=ends[0]["held_out_bytes"],
        runs=runs,
    )


def _run(path: Path) -> tuple[Result, dict[str, Any]]:
    """Returns the run's result and the last record of its log."""
    configuration, _, seed = path.stem.rpartition("-")
    previews: list[tuple[int, float]] = []
    end: dict[str, Any] = {}
    for record in map(json.loads, path.read_text().splitlines()):
        if "preview" in record:
            previews.append((record["step"], record["preview"]))
        elif "loss" not in record:
            end |= record  # for a resumed run: the second process' numbers
    numel = end["parameters"]
    memory = {kind: nbytes / numel for kind, nbytes in end["sizes"].items() if nbytes}
    sent = None if end["sent"] is None else end["sent"] / numel
    return Result(configuration, int(seed), end["held_out"], previews, memory, sent, end["first"]), end


def _machine() -> str:
    """Describes the machine: processor, usable cores, torch, Python and the fingerprint of its text."""
    name, info = platform.machine(), Path("/proc/cpuinfo")
    if info.is_file():
        name = next(
            (row.split(": ", 1)[1] for row in info.read_text().splitlines() if row.startswith("model name")), name
        )
    cores = len(os.sched_getaffinity(0))
    python = sys.version.split()[0]
    return f"{name}, {cores} cores; torch {torch.__version__}; Python {python}, text {text.fingerprint()}"
