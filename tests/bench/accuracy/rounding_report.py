"""python tests/bench --quality: what each way of rounding costs in accuracy, as tables and a picture.

Every figure is a function of the seed and of torch's random numbers, and does not depend on the machine, its load or
the thread count.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from bench import bench_report, plots
from bench.accuracy.rounding import (
    BETA2,
    DROP,
    ROUNDINGS,
    STATES,
    Decay,
    Track,
    follow_moments,
    follow_remainders,
    follow_weights,
)

_KINDS = [("fp32", "any")] + [(state, rounding) for state in STATES if state != "fp32" for rounding in ROUNDINGS]
_WEIGHT_STEPS = (200, 2000)
_REMAINDER_STEPS, _REMAINDER_SEEDS = 3000, 4
_QUICK_DECAY, _QUICK_WEIGHT_STEPS, _QUICK_REMAINDER_STEPS = Decay(elements=1024, warmup=200, decay=2400), (20, 200), 300


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="of torch's pool; no figure depends on it")
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="v against step (matplotlib)")
    parser.add_argument("--quick", action="store_true", help="small sizes: whether it runs; the figures say little")


def run(options: argparse.Namespace) -> int:
    """Prints the tables. Returns 1 if a remainder differs from the expected one, else 0."""
    if options.pictures:
        plots.require_matplotlib()
    torch.set_num_threads(options.threads)
    print(bench_report.facts(bench_report.machine(options.threads, options.seed)))
    if options.quick:
        print("quick: small sizes, these figures are no claims")
    decay = _QUICK_DECAY if options.quick else Decay()
    tracks, exact = follow_moments(decay, _KINDS, options.seed)
    print(_moments(decay, tracks), flush=True)
    print(_weights(options.seed, _QUICK_WEIGHT_STEPS if options.quick else _WEIGHT_STEPS, decay.elements), flush=True)
    text, right = _remainders(options.seed, options.quick)
    print(text, flush=True)
    if options.pictures:
        print(draw(decay, tracks, exact, options.pictures))
    return 0 if right else 1


def _moments(decay: Decay, tracks: Sequence[Track]) -> str:
    """Returns the table of exp_avg_sq after the gradients have dropped."""
    times = [decay.warmup, decay.warmup + 2000, decay.steps]
    rows = [["state of v", "rounding", "mean v / exact", "median v / exact", "rms error of the step, %"]]
    rows[0] += ["mean off at most, %", "step off at most, %"]
    for track in tracks:
        samples, later = [track.at(step) for step in times], track.after(decay.warmup)
        rows.append(
            [
                track.state,
                track.rounding,
                " / ".join(f"{s.mean:.3f}" for s in samples),
                " / ".join(f"{s.median:.3f}" for s in samples),
                " / ".join(f"{100 * s.step_error:.1f}" for s in samples),
                f"{100 * max(abs(s.mean - 1) for s in later):.1f}",
                f"{100 * max(s.step_error for s in later):.1f}",
            ]
        )
    head = (
        f"\nexp_avg_sq (v), beta2 = {BETA2}, {decay.elements:,} elements, gradients N(0, 1) x lognormal scales, after "
        f"{decay.warmup} steps\ntimes {DROP}: then / 2000 / {decay.decay} steps later, and the worst of all these "
        "steps. 8-bit: the root in unsigned e4m4, a scale per 128. Step: 1/sqrt(v).\n"
    )
    return head + bench_report.table(rows, left=2)


def _weights(seed: int, steps: Sequence[int], elements: int) -> str:
    """Returns the table of bf16 weights without master weights."""
    rows = [["rounding", *(f"after {step} steps" for step in steps)]]
    for error in follow_weights(steps, seed, elements):
        rows.append([error.rounding, *(f"{error.shares[step]:.3f}" for step in steps)])
    head = (
        f"\nbf16 weights without a master, {elements:,} of N(0, 1), lr 1e-4, steady direction: rms error as a share of "
        "the update.\nfloor: the exact weight, rounded once.\n"
    )
    return head + bench_report.table(rows, left=1)


def _remainders(seed: int, quick: bool) -> tuple[str, bool]:
    """Returns the table of remainders against fp32 masters, and whether they differ by nothing but the rule."""
    steps = _QUICK_REMAINDER_STEPS if quick else _REMAINDER_STEPS
    rows = [["seed", "elements x steps", "rule met", "elements that met it", "differ from the rule", "differ, not met"]]
    right = True
    for each in range(seed, seed + (1 if quick else _REMAINDER_SEEDS)):
        check = follow_remainders(steps, each)
        right &= check.differ_from_rule == check.differ_unmet == 0
        counts = (check.element_steps, check.met, check.elements_met, check.differ_from_rule, check.differ_unmet)
        rows.append([str(each), *(f"{count:,}" for count in counts)])
    head = (
        f"\n16-bit remainders beside fp32 masters, bf16 moments, {steps} steps, every step compared in every bit of "
        "weights, masters and moments.\nThe rule: the upper tie of an even weight is kept one fp32 ulp lower. Elements "
        "that differ from fp32 masters to which the rule is\ndone by hand; and, of those that have not met it, from "
        "plain fp32 masters:\n"
    )
    return head + bench_report.table(rows, left=0), right


_COLOURS = {"nearest": "#d1603d", "stochastic": "#e3b66b", "dithered": "#0b7a75"}


def draw(decay: Decay, tracks: Sequence[Track], exact: Track, folder: Path) -> Path:
    """Draws v against the step number, one panel per state, and below it the error of the step. Returns the file, which
    is in `folder`."""
    import matplotlib

    matplotlib.use("Agg")  # a file, no display
    import matplotlib.pyplot as plt

    states = [state for state in STATES if state != "fp32"]
    figure, panels = plt.subplots(
        2, len(states), figsize=(11, 6.5), sharex=True, sharey="row", layout="constrained", height_ratios=(3, 2)
    )
    for above, below, state in zip(*panels, states, strict=True):
        above.plot(*_line(exact, "level"), color="#9aa3b2", lw=5, label="exact", solid_capstyle="round")
        for track in tracks:
            if track.state == state:
                style = {"color": _COLOURS[track.rounding], "lw": 1.6, "label": track.rounding}
                above.plot(*_line(track, "level"), **style)
                below.plot(*_line(track, "step_error", 100), **style)
        above.set_title(f"v in {'unsigned 8 bits, as its root' if state == '8-bit' else state}", loc="left")
        above.set_yscale("log")
        below.set_yscale("log")
        below.set_xlabel("step")
        for axes in (above, below):
            axes.axvline(decay.warmup, color="#7d8491", lw=0.8, ls=":")
            axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("mean v / scale\N{SUPERSCRIPT TWO}")
    panels[1][0].set_ylabel("rms error of 1/\N{SQUARE ROOT}v, %")
    panels[0][0].legend(frameon=False)
    figure.suptitle(f"Gradients {1 / DROP:g} times smaller after {decay.warmup} steps, beta2 = {BETA2}", fontsize=11)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "v_against_step.png"
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def _line(track: Track, figure: str, factor: float = 1.0) -> tuple[list[int], list[float]]:
    return [s.step for s in track.samples], [factor * getattr(s, figure) for s in track.samples]


def _main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/bench --quality", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(_main())
