"""The benchmark's findings: figures with their targets, and skips with their reasons."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bench.timing import Spread, Times

FIGURES = ("goal", "met", "below", "shown")  # the verdicts; "shown": the figure has no target


class Bar(NamedTuple):
    """The targets of a figure: what it has to reach (`at_least`) and what it should reach (`goal`)."""

    at_least: float
    goal: float
    lower_is_better: bool = False

    def verdict(self, value: float) -> str:
        sign = -1 if self.lower_is_better else 1
        if sign * value >= sign * self.goal:
            return "goal"
        return "met" if sign * value >= sign * self.at_least else "below"


@dataclass(frozen=True)
class Figure:
    """A measured figure, with its target if it has one."""

    row: str  # a key of step_rows.ROWS
    what: str
    value: Spread
    bar: Bar | None = None
    beside: dict[str, float] = field(default_factory=dict)  # further numbers to print with it, by name

    @property
    def verdict(self) -> str:
        return self.bar.verdict(self.value.median) if self.bar else "shown"

    def as_json(self) -> dict[str, Any]:
        return {
            "row": self.row,
            "what": self.what,
            "median": self.value.median,
            "least": self.value.least,
            "most": self.value.most,
            "at_least": self.bar.at_least if self.bar else None,
            "goal": self.bar.goal if self.bar else None,
            "lower_is_better": self.bar.lower_is_better if self.bar else None,
            "verdict": self.verdict,
            "beside": self.beside,
        }

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> "Figure":
        """Returns the figure that as_json() was called on."""
        bar = None if given["goal"] is None else Bar(given["at_least"], given["goal"], given["lower_is_better"])
        value = Spread(given["median"], given["least"], given["most"])
        return cls(given["row"], given["what"], value, bar, given["beside"])


@dataclass(frozen=True)
class Skip:
    """A figure that could not be measured on this machine."""

    row: str
    what: str
    why: str


class Point(NamedTuple):
    """One optimizer in the picture of memory against time."""

    who: str
    bytes_per_parameter: float
    ns_per_parameter: float
    ours: bool


@dataclass
class Findings:
    """Everything that a run of the benchmark has found."""

    figures: list[Figure] = field(default_factory=list)
    skips: list[Skip] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    times: dict[str, Times] = field(default_factory=dict)  # name of an interleaved run -> its times
