"""Draws the picture of the main job: held-out loss by step in both stages, and the final loss against memory."""

from __future__ import annotations

import statistics
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # a file, no display
import matplotlib.pyplot as plt
from configurations import CONFIGURATIONS
from matplotlib.axes import Axes
from results import REFERENCE, Results, StageResults

INK, QUIET, PAPER = "#22262e", "#7d8491", "#ffffff"
# colour, width of the line, name in the picture
STYLES = {
    "torch-fp32": ("#9aa3b2", 6.0, "torch, fp32 model"),
    "torch-bf16": ("#d1603d", 2.0, "torch, bf16 model"),
    "bf16": ("#7cc4bd", 3.4, "torch_ext, bf16"),
    "bf16_remainder": ("#e3b66b", 2.2, "torch_ext, bf16_remainder"),
    "8bit": ("#0b5f5a", 1.2, "torch_ext, 8bit"),
}
assert set(STYLES) == set(CONFIGURATIONS)


def draw_losses(axes: Axes, stage: StageResults, title: str) -> None:
    """Draws the mean over the seeds of the loss on a tenth of the held-out text."""
    for name, (colour, width, label) in STYLES.items():
        curves = [dict(run.previews) for run in stage.of(name)]
        steps = sorted(curves[0])
        means = [statistics.fmean(curve[step] for curve in curves) for step in steps]
        axes.plot(steps, means, color=colour, lw=width, label=label, solid_capstyle="round")
    axes.set_xlabel("step")
    axes.set_title(title, loc="left", fontsize=10, pad=10)


def draw_memory(axes: Axes, stage: StageResults) -> None:
    """Draws one dot per run: final held-out loss minus the mean of fp32's, against bytes per parameter."""
    base = stage.mean(REFERENCE)
    axes.axhspan(-stage.spread(), stage.spread(), color="#9aa3b2", alpha=0.35, lw=0)
    for name, (colour, _, label) in STYLES.items():
        memory, losses = stage.memory(name), [run.held_out - base for run in stage.of(name)]
        axes.plot([memory] * len(losses), losses, "o", color=colour, ms=7, mec=PAPER, mew=0.8, clip_on=False)
        said = label.replace(", ", "\n").replace(" model", "") + f"\n{memory:.2f}"
        style = {"textcoords": "offset points", "fontsize": 7.5, "color": INK}
        if name == "torch-bf16":  # its dots are at the top
            axes.annotate(said, (memory, statistics.fmean(losses)), (10, 0), ha="left", va="center", **style)
        else:
            axes.annotate(said, (memory, max(losses)), (0, 8), ha="center", va="bottom", **style)
    axes.set_xlim(6.6, 17.4)
    axes.set_xlabel("bytes per parameter: weights, gradients, state")
    axes.set_title("Fine-tuned: loss above fp32's, and memory", loc="left", fontsize=10, pad=10)


def plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(QUIET)
    axes.tick_params(color=QUIET, labelcolor=INK, labelsize=8.5, length=3)


def draw(results: Results, path: Path) -> None:
    plt.rcParams.update({"font.family": "DejaVu Sans", "text.color": INK, "axes.labelcolor": INK})
    figure, panels = plt.subplots(
        1, 3, figsize=(13, 4.4), width_ratios=[1, 1, 1.15], facecolor=PAPER, layout="constrained"
    )
    for axes in panels:
        plain(axes)
    draw_losses(panels[0], results.stages["scratch"], "From random weights, high learning rate")
    draw_losses(panels[1], results.stages["finetune"], "Fine-tuned, low learning rate")
    panels[0].set_ylabel("held-out loss, nats per byte")
    draw_memory(panels[2], results.stages["finetune"])
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower left", ncols=len(STYLES), frameon=False, fontsize=8.5)
    figure.savefig(path, dpi=130)
    plt.close(figure)
