"""Makes the table and the picture of docs/cost.md."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.cost.cost_sweep import Row

_SHOWN = (2, 8, 64, 512, 4096)


def table(rows: "Sequence[Row]") -> str:
    """Returns Markdown tables, one per cluster. A cell has the milliseconds of a step: all-to-all / two-level /
    ring."""
    found = {(r.cluster, r.model, r.strategy, r.exchange, r.ranks): r.milliseconds for r in rows}
    shown = [n for n in _SHOWN if any(r.ranks == n for r in rows)]
    lines = []
    for cluster in dict.fromkeys(r.cluster for r in rows):
        lines += [f"| {cluster} | {' | '.join(f'N = {n}' for n in shown)} |", "|---|" + "---|" * len(shown)]
        for model, strategy in dict.fromkeys((r.model, r.strategy) for r in rows):
            cells = []
            for n in shown:
                of_n = (
                    found.get((cluster, model, strategy, exchange, n))
                    for exchange in ("all-to-all", "two-level", "ring")
                )
                cells.append(" / ".join("–" if ms is None else f"{ms:.0f}" for ms in of_n))
            lines.append(f"| {model}, {strategy} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


_COLOURS = {"all-to-all": "tab:blue", "two-level": "tab:orange", "ring": "tab:gray"}
_STYLES = {"optim": "-", "optim_grads_params": "--"}


def draw(rows: "Sequence[Row]", compute: Mapping[str, float], path: Path) -> None:
    """Draws the time of a step / the time of its computation, against the number of ranks. compute: milliseconds of the
    computation, by model."""
    import matplotlib

    matplotlib.use("Agg")  # a file, no display
    matplotlib.rcParams.update({"svg.hashsalt": "torch_ext", "svg.fonttype": "none"})  # the same small file each time
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter, NullFormatter

    clusters, models = list(dict.fromkeys(r.cluster for r in rows)), list(dict.fromkeys(r.model for r in rows))
    figure, grid = plt.subplots(len(clusters), len(models), figsize=(10, 7), layout="constrained", squeeze=False)
    for row, cluster in zip(grid, clusters, strict=True):
        for axes, model in zip(row, models, strict=True):
            for strategy, style in _STYLES.items():
                for exchange, colour in _COLOURS.items():
                    of_line = [r for r in rows if r[:4] == (cluster, model, strategy, exchange)]
                    x, y = [r.ranks for r in of_line], [r.milliseconds / compute[model] for r in of_line]
                    axes.plot(x, y, style, color=colour, marker=".", label=f"{exchange}, {strategy}")
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xticks(sorted({r.ranks for r in rows} & {*_SHOWN}))
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.yaxis.set_minor_formatter(NullFormatter())
            highest = max(r.milliseconds / compute[model] for r in rows if r[:2] == (cluster, model))
            axes.set_yticks([tick for tick in (1, 1.2, 1.5, 2, 3, 5, 10, 20, 50) if tick <= 1.2 * highest])
            axes.axhline(1, color="black", linewidth=0.5)
            axes.set_title(f"{model}, {cluster}", fontsize=9)
            axes.set_xlabel("ranks, 8 a node")
            axes.set_ylabel("step / computation alone")
            axes.spines[["top", "right"]].set_visible(False)
    grid[0][0].legend(fontsize=7)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
