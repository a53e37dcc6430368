"""The command line, `python -m torch_ext COMMAND`. Commands: info (what was found on this machine), plan (the bytes of
a model per rank), doctor (what silently loses updates), checkpoint (what is in one), config (flags for a C compiler).
"""

import argparse
import sys
from collections.abc import Callable

from torch_ext.cli import checkpoint as cli_checkpoint
from torch_ext.cli import config as cli_config
from torch_ext.cli import doctor as cli_doctor
from torch_ext.cli import info as cli_info
from torch_ext.cli import plan as cli_plan

Run = Callable[[argparse.Namespace], int]


def main(arguments: list[str] | None = None) -> int:
    """Runs the command and returns the exit status. `arguments`: None stands for the process's own. Raises
    SystemExit(2) if they are not legal."""
    parser = argparse.ArgumentParser(
        prog="python -m torch_ext",
        description="Shows what torch_ext has on this machine, plans memory, and checks models and checkpoints.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser("info", help="versions, instruction sets, threads, operators, the library's path, CUDA")
    info.set_defaults(run=_print_info)
    plan = commands.add_parser(
        "plan", help="bytes per rank of a model under each strategy, before anything is allocated"
    )
    cli_plan.add_arguments(plan)
    plan.set_defaults(run=cli_plan.run)
    doctor = commands.add_parser("doctor", help="finds what silently loses updates in a model and its optimizer")
    cli_doctor.add_arguments(doctor)
    doctor.set_defaults(run=cli_doctor.run)
    checkpoint = commands.add_parser("checkpoint", help="lists what is in a checkpoint, and compares its checksums")
    cli_checkpoint.add_arguments(checkpoint)
    checkpoint.set_defaults(run=cli_checkpoint.run)
    config = commands.add_parser("config", help="flags for C and C++ compilers, to build with the library")
    cli_config.add_arguments(config)
    config.set_defaults(run=cli_config.run)
    options = parser.parse_args(arguments)
    run: Run = options.run
    return run(options)


def _print_info(_options: argparse.Namespace) -> int:
    print(cli_info.text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
