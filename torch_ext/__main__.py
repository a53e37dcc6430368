"""python -m torch_ext info: what was found on this machine."""

import argparse
import sys

from torch_ext import _info


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m torch_ext", description="What torch_ext finds on this machine.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="versions, instruction sets, threads, operators, the library's path, CUDA")
    parser.parse_args(arguments)
    print(_info.text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
