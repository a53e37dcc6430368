"""The benchmark's command: python tests/bench [step | comm | accuracy | cost] ...

step, the default, and comm compare torch_ext with its peers, as ratios within one run. accuracy measures the rounding
errors of sums. cost simulates what a step takes on many ranks. Each of them has its own options (--help). `--quality`
instead of them prints what the roundings cost."""

import argparse
import importlib
import os
import pathlib
import sys
from collections.abc import Callable

_HERE = pathlib.Path(__file__).absolute().parent

# The command's first word -> the module that measures it.
_BENCHES = {
    "step": "bench.step",
    "comm": "bench.comm.run",
    "accuracy": "bench.accuracy.reduction",
    "cost": "bench.cost.cost_sweep",
}
_QUALITY = "bench.accuracy.rounding_report"


def find_packages() -> None:
    """Makes `bench` and `torch_ext` importable: from this checkout, or torch_ext from PYTHONPATH if it is there.
    Removes this folder from sys.path, where Python puts a script's folder first: its files are modules of the package
    `bench` only."""
    sys.path[:] = [folder for folder in sys.path if pathlib.Path(folder or ".").absolute() != _HERE]
    named = [pathlib.Path(folder) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    sys.path.insert(0, str(_HERE.parent))
    if not any((folder / "torch_ext").is_dir() for folder in named):
        sys.path.insert(0, str(_HERE.parent.parent))


def main(arguments: list[str] | None = None) -> int:
    """Runs the command and returns its exit status. arguments: None for those of the process. Raises SystemExit(2) if
    they are not legal."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="python tests/bench", description="Ours against its peers, as ratios.")
    what = next((word for word in arguments[:1] if word in _BENCHES), "step")
    parser.add_argument(
        "what",
        nargs="?",
        choices=_BENCHES,
        default="step",
        help="the optimizer's step unless given; the data-parallel exchange; the accuracy of sums; a step on many "
        "ranks, simulated. Each has options",
    )
    if what == "step":
        parser.add_argument(
            "--quality", action="store_true", help="what the roundings cost instead; it has its own options"
        )
    bench = importlib.import_module(_QUALITY if "--quality" in arguments else _BENCHES[what])
    bench.add_arguments(parser)
    run: Callable[[argparse.Namespace], int] = bench.run
    return run(parser.parse_args(arguments))


if __name__ == "__main__":
    find_packages()
    sys.exit(main())
