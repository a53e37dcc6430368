"""The outcome of one run of a fault, and the lines that are printed about all runs of a kind."""

from dataclasses import dataclass, field


@dataclass
class Report:
    """The answer of a process that ended normally."""

    runs: int = 1
    """How many runs it counts for."""
    silent: list[str] = field(default_factory=list)
    unnamed: list[str] = field(default_factory=list)
    skipped: str = ""
    """Why nothing was done; "" if something was."""


@dataclass
class Outcome:
    """What is wrong with one run, by kind of finding. seconds: the longest time that a call took until it raised."""

    hung: list[str] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)
    unnamed: list[str] = field(default_factory=list)
    crashed: list[str] = field(default_factory=list)
    seconds: float = 0.0
    skipped: str = ""
    runs: int = 1
    """How many runs it counts for."""

    def add(self, report: Report) -> None:
        self.silent += report.silent
        self.unnamed += report.unnamed
        self.skipped = self.skipped or report.skipped
        self.runs = max(self.runs, report.runs)

    def problems(self) -> list[str]:
        return [f"{name}: {text}" for name in ("hung", "silent", "unnamed", "crashed") for text in getattr(self, name)]


class Tally:
    """The counts of all runs of one kind of fault."""

    def __init__(self, kind: str, what: str) -> None:
        self.kind, self.what = kind, what
        self.runs, self.skips, self.worst, self.skipped = 0, 0, 0.0, ""
        self.counts = dict.fromkeys(("hung", "silent", "unnamed", "crashed"), 0)

    def add(self, outcome: Outcome) -> None:
        if outcome.skipped:
            self.skips += 1
            self.skipped = outcome.skipped
            return
        self.runs += outcome.runs
        self.worst = max(self.worst, outcome.seconds)
        for name in self.counts:
            self.counts[name] += len(getattr(outcome, name))

    @property
    def failed(self) -> bool:
        return any(self.counts.values())

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {name}" for name, count in self.counts.items())
        line = f"{self.kind:14} {self.runs:5} runs: {counts}; slowest error {self.worst:.1f} s ({self.what})"
        return f"{line}\n{self.kind:14} {self.skips:5} SKIPPED: {self.skipped}" if self.skips else line
