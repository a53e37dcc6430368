"""Draws the benchmark's picture: memory against time. Needs matplotlib."""

import importlib.util
from pathlib import Path
from typing import Any

from bench.figures import Point


def require_matplotlib() -> None:
    """Raises SystemExit with an instruction if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise SystemExit("torch_ext: --pictures needs matplotlib, which is not installed: pip install matplotlib")


def bytes_against_time(points: list[Point], facts: dict[str, Any], folder: Path) -> Path:
    """Draws resident bytes against the time of a step, both per parameter. Returns the file, which is in `folder`."""
    import matplotlib

    matplotlib.use("Agg")  # a file, no display
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
    for point in points:
        x, y = point.bytes_per_parameter, point.ns_per_parameter
        name = f"ours ({point.who})" if point.ours else point.who
        axes.plot(x, y, "o" if point.ours else "s", color="tab:blue" if point.ours else "tab:gray")
        # A peer's point may be close to one of ours, so a peer's label is above its point and ours below.
        place, side = ((0, -13), "top") if point.ours else ((0, 6), "bottom")
        text = f"{name}\n{y:.2f} ns"
        axes.annotate(text, (x, y), xytext=place, textcoords="offset points", ha="center", va=side, fontsize=8)
    axes.set_xlabel("resident bytes per parameter: parameters, gradients, state")
    axes.set_ylabel("ns per parameter and step, median")
    axes.set_xlim(left=4, right=max((p.bytes_per_parameter for p in points), default=20) * 1.3)
    axes.set_ylim(0, max((p.ns_per_parameter for p in points), default=1) * 1.15)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(
        f"{facts['processor']}, {facts['threads']} threads, {facts['in use']}, torch {facts['torch']}", fontsize=9
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "bytes_against_time.png"
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path
