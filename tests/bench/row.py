"""The argument of every row of the benchmark: the settings to measure with, and where its figures go."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bench import timing
from bench.figures import Bar, Figure, Findings, Skip
from bench.timing import Spread
from bench.workload import Shapes


@dataclass(frozen=True)
class Bench:
    """The settings of a run and its findings. Each row creates its own tensors and drops them at its end."""

    params: int  # of one flat tensor
    model: Shapes  # GPT-2 small, or something of its form
    rounds: int
    threads: int
    isas: list[str]
    seed: int
    findings: Findings

    @property
    def flat(self) -> Shapes:
        return [(self.params,)]

    def run(self, name: str, contenders: Mapping[str, Callable[[], object]], rounds: int) -> timing.Times:
        times = timing.interleave(contenders, rounds)
        self.findings.times[name] = times
        return times

    def add(
        self, row: str, what: str, value: Spread, bar: Bar | None = None, beside: dict[str, float] | None = None
    ) -> None:
        self.findings.figures.append(Figure(row, what, value, bar, beside or {}))

    def skip(self, row: str, what: str, why: object) -> None:
        self.findings.skips.append(Skip(row, what, str(why)))
