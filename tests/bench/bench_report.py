"""Formats the benchmark's findings, as text and as JSON."""

import os
import platform
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

import torch_ext
from bench.figures import FIGURES, Bar, Figure, Findings, Skip
from torch_ext.cli import info

_WIDTH = 66  # of the column that names the figure


def machine(threads: int, seed: int) -> dict[str, Any]:
    """Returns the facts on which every figure depends: versions, processor, threads, seed, load."""
    return {
        "torch_ext": torch_ext.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "instruction sets": info.isas(),
        "in use": info.selected_isa(),
        "threads": threads,
        "seed": seed,
        "huge pages": _huge_pages(),
        "load before": round(os.getloadavg()[0], 2),
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.machine()


def _huge_pages() -> str:
    """Returns the setting of transparent huge pages: "always", "madvise" (only on request), "never" or "unknown"."""
    try:
        with open("/sys/kernel/mm/transparent_hugepage/enabled") as file:
            return file.read().partition("[")[2].partition("]")[0]
    except OSError:
        return "unknown"


def facts(values: dict[str, Any]) -> str:
    """Returns one line per fact, in columns."""
    width = max(map(len, values))
    texts = {key: ", ".join(map(str, v)) if isinstance(v, list) else str(v) for key, v in values.items()}
    return "\n".join(f"{key:<{width}}  {text}" for key, text in texts.items())


def header() -> str:
    return f"{'figure':<{_WIDTH}} {'median':>7}  {'(min .. max)':<17} {'at least':>8} {'goal':>6}  verdict"


def figure_line(figure: Figure) -> str:
    value = figure.value
    between = f"({value.least:.3f} .. {value.most:.3f})"
    text = f"{figure.what:<{_WIDTH}} {value.median:>7.3f}  {between:<17} {_asked(figure.bar):>15}  {figure.verdict}"
    if figure.beside:
        text += "\n    " + "; ".join(f"{name} {number:.4g}" for name, number in figure.beside.items())
    return text


def skip_line(skip: Skip) -> str:
    return f"{skip.what:<{_WIDTH}} SKIPPED: {skip.why}"


def lines(figures: Sequence[Figure], skips: Sequence[Skip]) -> str:
    return "\n".join([*map(figure_line, figures), *map(skip_line, skips)])


def _asked(bar: Bar | None) -> str:
    return "" if bar is None else f"{'<= ' if bar.lower_is_better else ''}{bar.at_least:g} {bar.goal:>6g}"


def closing(findings: Findings) -> str:
    """Returns the last line: how many figures have each verdict, and how many were skipped."""
    count = Counter(figure.verdict for figure in findings.figures)
    verdicts = ", ".join(f"{count[verdict]} {verdict}" for verdict in FIGURES)
    return f"{len(findings.figures)} figures: {verdicts}; {len(findings.skips)} skipped"


def table(rows: list[list[str]], left: int) -> str:
    """Returns a Markdown table, padded so that its source reads well. The first `left` columns are aligned left, the
    others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rule = ["-" * w if i < left else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    lines = []
    for row in [rows[0], rule, *rows[1:]]:
        cells = [f"{c:<{w}}" if i < left else f"{c:>{w}}" for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def as_json(facts: dict[str, Any], options: dict[str, Any], findings: Findings) -> dict[str, Any]:
    return {
        "machine": facts,
        "options": options,
        "figures": [figure.as_json() for figure in findings.figures],
        "skips": [vars(skip) for skip in findings.skips],
        "points": [point._asdict() for point in findings.points],
        "seconds": findings.times,
    }
