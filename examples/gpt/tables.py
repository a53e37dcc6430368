"""Prints the main job's results as Markdown, from its JSON.

python examples/gpt/tables.py [examples/gpt/results.json]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from configurations import CONFIGURATIONS, MORE
from results import REFERENCE, Results, StageResults

TITLES = {
    "finetune": "Fine-tuned at a low learning rate",
    "scratch": "From random weights, few steps at a high learning rate",
}
_COLUMNS = ["AdamW", "bytes per parameter", "held-out loss, each seed", "mean - fp32's", "that / spread"]


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table with aligned columns; the first row is the header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rule = ["-" * w if i == 0 else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    align = [str.ljust, *[str.rjust] * (len(widths) - 1)]
    lines = [[side(cell, w) for side, cell, w in zip(align, row, widths, strict=True)] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in [lines[0], rule, *lines[1:]])


def table(stage: StageResults) -> str:
    """Returns a table with one row per configuration."""
    with_sent = stage.processes > 1
    rows = [_COLUMNS + ["bytes sent per parameter and step"] * with_sent]
    for name in stage.configurations():
        runs, excess = stage.of(name), stage.excess(name)
        row = [
            (CONFIGURATIONS | MORE)[name].label,
            f"{stage.memory(name):.2f}",
            ", ".join(f"{run.held_out:.4f}" for run in runs),
            "" if name == REFERENCE else f"{excess:+.4f}",
            "" if name == REFERENCE else f"{excess / stage.spread():+.1f}",
        ]
        sent = [run.sent for run in runs if run.sent is not None]
        rows.append(row + [f"{sum(sent) / len(sent):.2f}" if sent else "not told"] * with_sent)
    return markdown(rows)


def section(name: str, stage: StageResults) -> str:
    """Returns a stage's title, settings, table and the explanation of its numbers."""
    seeds = len(stage.of(REFERENCE))
    ranks = "one process" if stage.processes == 1 else f"{stage.processes} processes over gloo"
    return (
        f"{TITLES[name]}: {stage.steps} steps of {stage.bytes_per_step:,} bytes, learning rate up to "
        f"{stage.peak_lr:g}, {ranks}, {stage.parameters:,} parameters.\n\n"
        f"{table(stage)}\n\n"
        f"Nats per byte, over {stage.held_out_bytes:,} held-out bytes. The spread, the sample standard deviation of "
        f"fp32's loss over its {seeds} seeds, is {stage.spread():.4f}."
    )


def report(results: Results) -> str:
    sections = [section(name, stage) for name, stage in results.stages.items()]
    return "\n\n".join([*sections, f"`{results.command}` on: {results.machine}."])


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "results.json"
    print(report(Results.load(path)))


if __name__ == "__main__":
    main()
