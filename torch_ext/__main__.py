"""python -m torch_ext: info, what was found on this machine; plan, the bytes of a model per rank; bench, the step or
the exchange against their peers."""

import argparse
import importlib
import sys
from collections.abc import Callable

from torch_ext import _info

Run = Callable[[argparse.Namespace], int]

# What `bench` measures -> who does. Each has its own options.
_BENCHES = {"step": "_bench", "comm": "_bench_comm", "accuracy": "_bench_accuracy"}
_QUALITY = "_bench_quality"


def main(arguments: list[str] | None = None) -> int:
    """`arguments`: those of the process where None. Returns the exit status; leaves by SystemExit(2) where they are not
    legal."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="python -m torch_ext", description="What torch_ext is, and does, here.")
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser("info", help="versions, instruction sets, threads, operators, the library's path, CUDA")
    info.set_defaults(run=_print_info)
    plan = commands.add_parser(
        "plan", help="bytes per rank of a model under each strategy, before anything is allocated"
    )
    if arguments[:1] == ["plan"]:
        plan.set_defaults(run=_add_plan(plan))
    bench = commands.add_parser("bench", help="ours against its peers, as ratios: the step, or something else")
    what = next((word for word in arguments[1:2] if word in _BENCHES), "step")
    bench.add_argument(
        "what",
        nargs="?",
        choices=_BENCHES,
        default="step",
        help="the optimizer's step unless given; the data-parallel exchange; the accuracy of sums. Each has options",
    )
    if what == "step":
        bench.add_argument(
            "--quality", action="store_true", help="what the roundings cost instead; it has its own options"
        )
    if arguments[:1] == ["bench"]:
        bench.set_defaults(run=_add_bench(bench, _QUALITY if "--quality" in arguments else _BENCHES[what]))
    options = parser.parse_args(arguments)
    run: Run = options.run
    return run(options)


def _print_info(_options: argparse.Namespace) -> int:
    print(_info.text())
    return 0


def _add_plan(parser: argparse.ArgumentParser) -> Run:
    from torch_ext import _memory_report

    _memory_report.add_arguments(parser)
    return _memory_report.run


def _add_bench(parser: argparse.ArgumentParser, module: str) -> Run:
    """The options of a benchmark, which is imported only now that it is wanted."""
    bench = importlib.import_module(f"torch_ext.{module}")
    bench.add_arguments(parser)
    run: Run = bench.run
    return run


if __name__ == "__main__":
    sys.exit(main())
