"""The result of `diagnose`: a report of findings, to print, to log, or for an exit code."""

import dataclasses
import textwrap
from collections.abc import Sequence
from typing import Any

_SHOWN = 3  # how many names of a finding are printed
_WIDTH = 110

# Kind of a finding -> its default severity.
#   error: updates are lost or wrong; warning: they are, unless this is intended; note: nothing is lost now.
KINDS = {
    "stale_references": "error",
    "in_no_group": "error",
    "in_two_groups": "error",
    "not_of_the_model": "note",
    "upcast_missing": "error",
    "lost_updates": "error",
    "stalled_exp_avg_sq": "error",
    "stale_masters": "error",
    "missing_moments": "error",
    "misshapen_moments": "error",
    "inconsistent_moments": "error",
    "nonfinite_state": "error",
    "no_state": "warning",
    "not_read": "note",
}
SEVERITIES = ("error", "warning", "note")


class DiagnosisError(RuntimeError):
    """Raised by `Report.raise_for_findings`; its text is the report's."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One problem that loses updates, or may lose updates."""

    kind: str
    """Name of the problem: a key of KINDS."""
    severity: str
    """ "error": updates are lost or wrong; "warning": they are, unless it is intended; "note": nothing is lost now."""
    message: str
    """What was found, and its effect."""
    names: tuple[str, ...]
    """Names of all affected parameters."""
    figure: float | None
    """The amount: a share in [0, 1], or a number of elements (`unit` says which); None if nothing was counted."""
    unit: str
    """Unit of the figure: "of updates", "elements", ..."""
    fix: str
    """A line of code that fixes the problem."""

    @property
    def count(self) -> int:
        """The number of affected parameters."""
        return len(self.names)

    def amount(self) -> str:
        """Returns the figure as text: "71.2 % of updates", "1,024 elements"."""
        if self.figure is None:
            return ""
        share = self.unit.startswith("of ")
        return f"{100 * self.figure:.3g} % {self.unit}" if share else f"{self.figure:,.0f} {self.unit}"

    def parameters(self) -> str:
        """Returns the first names, and how many more there are."""
        return first_of(self.names)


def first_of(names: Sequence[str], shown: int = _SHOWN) -> str:
    """Returns the first names, and how many more there are."""
    others = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + others


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of `torch_ext.diagnose`. `print(report)` shows a table, then each finding with a line to fix it."""

    optimizer: str
    """Classes of the optimizer and those that it wraps, the outermost first."""
    parameters: int
    """Number of trainable parameters of the model."""
    elements: int
    """Number of elements of these parameters on this rank."""
    findings: tuple[Finding, ...]
    """All findings, the most serious first."""

    @property
    def ok(self) -> bool:
        """Whether there is no error and no warning."""
        return all(finding.severity == "note" for finding in self.findings)

    def of(self, kind: str) -> list[Finding]:
        """Returns the findings of one kind. Raises ValueError for an unknown kind."""
        if kind not in KINDS:
            raise ValueError(f"{kind!r} is not a kind of finding; {', '.join(KINDS)} are legal")
        return [finding for finding in self.findings if finding.kind == kind]

    def raise_for_findings(self, severity: str = "warning") -> None:
        """Raises DiagnosisError, with this report as its text, if a finding is at least as serious as `severity`."""
        if severity not in SEVERITIES:
            raise ValueError(f"severity is {severity!r}; {', '.join(map(repr, SEVERITIES))} are legal")
        serious = SEVERITIES[: SEVERITIES.index(severity) + 1]
        if any(finding.severity in serious for finding in self.findings):
            raise DiagnosisError(str(self))

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as numbers, strings, lists and dicts, for a logger or json.dumps."""
        found = [
            {field.name: getattr(f, field.name) for field in dataclasses.fields(f)}
            | {"names": list(f.names), "count": f.count}
            for f in self.findings
        ]
        whole = {"optimizer": self.optimizer, "parameters": self.parameters, "elements": self.elements}
        return whole | {"ok": self.ok, "findings": found}

    def __str__(self) -> str:
        counts = [(sum(f.severity == s for f in self.findings), s) for s in SEVERITIES]
        said = [f"{n} {s}{'s' * (n != 1)}" for n, s in counts if n] or ["nothing found"]
        head = f"{self.optimizer}, {self.parameters:,} trainable parameters, {self.elements:,} elements: "
        lines = [head + ", ".join(said)]
        if self.findings:
            lines += ["", *_table(self.findings)]
        for f in self.findings:
            lines += ["", f"{f.kind} ({f.severity})", *_wrapped(f.message), f"  write: {f.fix}"]
        return "\n".join(lines)


def _table(findings: Sequence[Finding]) -> list[str]:
    rows = [("severity", "finding", "count", "figure", "parameters")]
    rows += [(f.severity, f.kind, f"{f.count:,}", f.amount(), f.parameters()) for f in findings]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def _wrapped(message: str) -> list[str]:
    return textwrap.wrap(message, _WIDTH, initial_indent="  ", subsequent_indent="  ", break_long_words=False)


def finding(
    kind: str,
    message: str,
    names: Sequence[str],
    fix: str,
    figure: float | None = None,
    unit: str = "",
    severity: str | None = None,
) -> Finding:
    """Returns a finding; its severity is its kind's, unless one is given."""
    return Finding(kind, severity or KINDS[kind], message, tuple(names), figure, unit, fix)
