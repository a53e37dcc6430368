"""Reads the logs of train.py from OUT and ends the main job: a table (printed, and OUT/table.md) and OUT/gpt.png.
Exit status 1 where ours is further than CRITERION from the fp32 model.

    python examples/gpt/report.py [OUT]
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # a file, no display
import matplotlib.pyplot as plt
import text
from matplotlib.axes import Axes

CRITERION = 0.02  # nats: how close ours comes to the fp32 model


@dataclass
class Run:
    """One line of the table: what one log says."""

    recipe: str
    seed: int
    loss: dict[int, float] = field(default_factory=dict)  # of rank 0's batch, by step
    preview: dict[int, float] = field(default_factory=dict)  # of a tenth of the held-out text
    validation: float = float("nan")  # of all of it, at the end
    held_out_bytes: int = 0
    step_ms: float = 0.0
    update_ms: float = 0.0
    sent: float | None = None
    parameters: int = 1
    world: int = 1
    sizes: dict[str, int] = field(default_factory=dict)
    resumed_at: int = 0

    @staticmethod
    def read(path: Path) -> Run:
        recipe, _, seed = path.stem.rpartition("-")
        run = Run(recipe, int(seed))
        for line in path.read_text().splitlines():
            record = json.loads(line)
            if "loss" in record:
                run.loss[record["step"]] = record["loss"]
            elif "preview" in record:
                run.preview[record["step"]] = record["preview"]
            elif "validation" in record:
                run.validation, run.held_out_bytes = record["validation"], record["held_out_bytes"]
            else:
                run.resumed_at = record["first"]
                for name in ("step_ms", "update_ms", "sent", "parameters", "world", "sizes"):
                    setattr(run, name, record[name])
        return run

    def bytes_per_parameter(self, kind: str | None = None) -> float:
        sizes = self.sizes.values() if kind is None else [self.sizes.get(kind, 0)]
        return sum(sizes) / self.parameters


NAMES = {
    "ours": "torch_ext, bf16 model",
    "torch-fp32": "torch AdamW + DDP, fp32 model",
    "torch-bf16": "torch AdamW + DDP, bf16 model",
}


COLUMNS = [
    "recipe",
    "seed",
    "validation loss, nats/byte",
    "memory, bytes/param",
    "sent per step, bytes/param",
    "step, ms",
    "of it clip and update, ms",
]


def table(runs: list[Run]) -> str:
    """Markdown, one row a run, aligned for reading as it is."""
    rows = [COLUMNS]
    for run in runs:
        sent = "not told" if run.sent is None else f"{run.sent / run.parameters:.2f}"
        measured = [f"{run.validation:.4f}", f"{run.bytes_per_parameter():.2f}", sent]
        rows.append([NAMES[run.recipe], str(run.seed), *measured, f"{run.step_ms:.0f}", f"{run.update_ms:.1f}"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * w if i == 0 else "-" * (w - 1) + ":" for i, w in enumerate(widths)])
    align = [str.ljust, *[str.rjust] * (len(COLUMNS) - 1)]
    cells = [[side(cell, w) for side, cell, w in zip(align, row, widths, strict=True)] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def verdict(runs: list[Run]) -> tuple[str, bool]:
    """How ours stands to the fp32 model of its seed, beside what a seed makes; and whether it is close enough."""
    validation = {(run.recipe, run.seed): run.validation for run in runs}
    ours, fp32 = validation["ours", 0], validation["torch-fp32", 0]
    spread = abs(fp32 - validation["torch-fp32", 1])
    close = abs(ours - fp32) <= CRITERION
    return (
        f"ours - fp32: {ours - fp32:+.4f} nats (within {CRITERION}: {'yes' if close else 'NO'}); "
        f"bf16 without masters - fp32: {validation['torch-bf16', 0] - fp32:+.4f}; "
        f"two seeds of fp32 are {spread:.4f} apart"
    ), close


# -- the picture ---------------------------------------------------------------------------------------------------

INK, QUIET, PAPER = "#22262e", "#7d8491", "#ffffff"
COLOURS = {"ours": "#0b7a75", "torch-fp32": "#9aa3b2", "torch-bf16": "#d1603d"}
# What the optimizer keeps, from the bottom of the stack: its name in the log and in the picture, its tint, its text's.
PARTS = [
    ("weights", "weights", "#123c4a", PAPER),
    ("gradients", "gradients", "#2a6f7f", PAPER),
    ("exp_avg", "exp_avg", "#6aa9ae", INK),
    ("exp_avg_sq", "exp_avg_sq", "#a9cfcb", INK),
    ("master_param", "masters", "#e3b66b", INK),
]


def smooth(values: list[float], keep: float = 0.9) -> list[float]:
    """Exponential mean without the bias of its start."""
    mean, out = 0.0, []
    for i, value in enumerate(values):
        mean = keep * mean + (1 - keep) * value
        out.append(mean / (1 - keep ** (i + 1)))
    return out


def draw_losses(axes: Axes, runs: list[Run]) -> None:
    styles = {"torch-fp32": ("-", 5.0), "torch-bf16": ("-", 1.4), "ours": ("-", 1.8)}
    inset = axes.inset_axes((0.44, 0.42, 0.54, 0.52))
    for run in [run for recipe in styles for run in runs if run.recipe == recipe and run.seed == 0]:
        line, width = styles[run.recipe]
        style = {"ls": line, "lw": width, "color": COLOURS[run.recipe], "solid_capstyle": "round"}
        steps, previews = sorted(run.loss), sorted(run.preview)
        axes.plot(steps, smooth([run.loss[step] for step in steps]), label=NAMES[run.recipe], **style)
        inset.plot(previews[1:], [run.preview[step] for step in previews[1:]], **style)
        if run.resumed_at:
            axes.axvline(run.resumed_at, ymax=0.34, color=QUIET, lw=0.8, ls=":")
            note = {"color": QUIET, "fontsize": 8, "transform": axes.get_xaxis_transform()}
            axes.text(run.resumed_at, 0.03, "  ours resumes in a new process", **note)
    inset.set_title("a tenth of the held-out text", fontsize=9, loc="left")
    plain(inset, 8)
    axes.set_xlabel("step")
    axes.set_title("Training loss, nats per byte (smoothed)", loc="left", fontsize=11, pad=12)
    axes.margins(x=0.01)


def draw_memory(axes: Axes, runs: list[Run]) -> None:
    bars = {"torch\nbf16": "torch-bf16", "torch_ext\nbf16": "ours", "torch\nfp32": "torch-fp32"}
    for place, recipe in enumerate(bars.values()):
        run, bottom = next(run for run in runs if run.recipe == recipe), 0.0
        for kind, label, tint, ink in PARTS:
            height = run.bytes_per_parameter(kind)
            if height > 0:
                axes.bar(place, height, 0.74, bottom=bottom, color=tint, edgecolor=PAPER, linewidth=1.5)
                axes.text(place, bottom + height / 2, label, ha="center", va="center", color=ink, fontsize=8)
                bottom += height
        axes.text(place, bottom + 0.25, f"{run.bytes_per_parameter():.2f}", ha="center", va="bottom", weight="bold")
    axes.set_xticks(range(len(bars)), list(bars))
    axes.set_title("Optimizer memory, bytes per parameter", loc="left", fontsize=11, pad=12)
    axes.spines["left"].set_visible(False)
    axes.set_yticks([])
    axes.tick_params(axis="x", length=0)


def plain(axes: Axes, size: int) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(QUIET)
    axes.tick_params(color=QUIET, labelcolor=INK, labelsize=size, length=3)


def draw(runs: list[Run], path: Path) -> None:
    plt.rcParams.update({"font.family": "DejaVu Sans", "text.color": INK, "axes.labelcolor": INK})
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(11.5, 4.8), width_ratios=[1.75, 1], facecolor=PAPER, layout="constrained"
    )
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.08, wspace=0.04)
    plain(left, 9)
    plain(right, 9)
    draw_losses(left, runs)
    draw_memory(right, runs)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower left", ncols=3, frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)


def main() -> None:
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "out")
    runs = [Run.read(path) for path in sorted(out.glob("*-[0-9].jsonl"))]
    runs.sort(key=lambda run: (list(NAMES).index(run.recipe), run.seed))
    ours = runs[0]
    sentence, close = verdict(runs)
    closing = (
        f"{table(runs)}\n\n{sentence}.\n{ours.parameters:,} parameters, {ours.world} processes, mean over "
        f"{ours.held_out_bytes:,} held-out bytes, Python {sys.version.split()[0]} (text {text.fingerprint()})."
    )
    (out / "table.md").write_text(closing + "\n")
    draw(runs, out / "gpt.png")
    print(f"\n{closing}\nPicture: {out / 'gpt.png'}")
    if not close:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
