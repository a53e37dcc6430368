"""python -m torch_ext config: prints a C or C++ compiler's flags to build a program with the library."""

import argparse
import os
import shlex

from torch_ext.native import paths


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cflags", action="store_true", help="compiler flags that name the folder of the headers")
    parser.add_argument(
        "--libs", action="store_true", help="linker flags that name the library, at link time and at run time"
    )
    parser.add_argument(
        "--delta", action="store_true", help="libtorch_ext_delta.so, for inference engines: torch_ext_delta.h alone"
    )
    parser.set_defaults(refuse=parser.error)


def run(options: argparse.Namespace) -> int:
    """Prints the flags that were asked for; both kinds if none was. Raises SystemExit(2), with a message, if the
    headers or the library are missing."""
    both = options.cflags == options.libs
    words: list[str] = []
    try:
        if both or options.cflags:
            words.append(f"-I{paths.get_include()}")
        if both or options.libs:
            words += _libs(paths.delta_library_path() if options.delta else paths.library_path())
    except ImportError as missing:
        options.refuse(str(missing))
    print(shlex.join(words))
    return 0


def _libs(path: str) -> list[str]:
    folder, name = os.path.split(path)
    return [f"-L{folder}", f"-l{name.removeprefix('lib').removesuffix('.so')}", f"-Wl,-rpath,{folder}"]
