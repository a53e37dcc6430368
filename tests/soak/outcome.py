"""What became of one run of a fault, and the lines that are printed of all of them."""

from dataclasses import dataclass, field


@dataclass
class Outcome:
    """Each list says what was wrong; the seconds are the longest that a call took which raised."""

    hung: list[str] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)
    unnamed: list[str] = field(default_factory=list)
    crashed: list[str] = field(default_factory=list)
    seconds: float = 0.0
    skipped: str = ""
    runs: int = 1
    """That it counts for."""

    def problems(self) -> list[str]:
        return [f"{name}: {text}" for name in ("hung", "silent", "unnamed", "crashed") for text in getattr(self, name)]


class Tally:
    """Of one kind of fault."""

    def __init__(self, kind: str, what: str) -> None:
        self.kind, self.what = kind, what
        self.runs, self.worst, self.skipped = 0, 0.0, ""
        self.counts = dict.fromkeys(("hung", "silent", "unnamed", "crashed"), 0)

    def add(self, outcome: Outcome) -> None:
        if outcome.skipped:
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
        skipped = f"; skipped: {self.skipped}" if self.skipped else ""
        return f"{self.kind:14} {self.runs:5} runs: {counts}; slowest error {self.worst:.1f} s ({self.what}){skipped}"
