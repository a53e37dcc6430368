"""python -m torch_ext: info, what was found on this machine; plan, the bytes of a model per rank; bench, the step or the
exchange against their peers."""

import argparse
import sys
from collections.abc import Callable

from torch_ext import _info

Run = Callable[[argparse.Namespace], int]


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
    bench = commands.add_parser("bench", help="ours against its peers, as ratios: the step, or the exchange")
    comm = arguments[:2] == ["bench", "comm"]
    bench.add_argument(
        "what",
        nargs="?",
        choices=["comm"],
        help="the data-parallel exchange instead of the step; it has its own options",
    )
    if not comm:
        bench.add_argument(
            "--quality", action="store_true", help="what the roundings cost instead; it has its own options"
        )
    if arguments[:1] == ["bench"]:
        bench.set_defaults(run=_add_bench(bench, comm, quality="--quality" in arguments))
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


def _add_bench(parser: argparse.ArgumentParser, comm: bool, quality: bool) -> Run:
    """The options of a benchmark, which is imported only now that it is wanted."""
    if comm:
        from torch_ext import _bench_comm

        _bench_comm.add_arguments(parser)
        return _bench_comm.run
    if quality:
        from torch_ext import _bench_quality

        _bench_quality.add_arguments(parser)
        return _bench_quality.run
    from torch_ext import _bench

    _bench.add_arguments(parser)
    return _bench.run


if __name__ == "__main__":
    sys.exit(main())
