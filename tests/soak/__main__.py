"""python tests/soak --seconds N [--seed S] [--kinds kill stop ...]: causes faults at random moments until the time is
over, then prints one line for each kind of fault. Exit status 1 if anything is found.

hung: a process did not end within its time limit. silent: a wrong result without an error. unnamed: an error that does
not say where the fault is (the rank, or the file and the key). crashed: a process that ended, or raised, although no
fault was caused in it. Each finding is printed with the command that repeats it.
"""

import argparse
import os
import pathlib
import sys

_HERE = pathlib.Path(__file__).absolute().parent

# Before torch is imported: processes share the cores, and the host's name need not resolve.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def find_packages() -> None:
    """Makes `soak` and `torch_ext` importable: torch_ext from PYTHONPATH if it is there, else from this checkout."""
    sys.path[:] = [folder for folder in sys.path if pathlib.Path(folder or ".").absolute() != _HERE]
    named = [pathlib.Path(folder) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    sys.path.insert(0, str(_HERE.parent))
    if not any((folder / "torch_ext").is_dir() for folder in named):
        sys.path.insert(0, str(_HERE.parent.parent))


def main() -> int:
    from soak import driver

    parser = argparse.ArgumentParser(prog="python tests/soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="after which no further run begins (60)")
    parser.add_argument("--runs", type=int, help="of each kind at most")
    parser.add_argument("--seed", type=int, default=0, help="runs of a seed are the same, but for the machine's pace")
    parser.add_argument("--kinds", nargs="+", choices=driver.kinds(), metavar="KIND", help=" ".join(driver.kinds()))
    parser.add_argument("--jobs", type=int, default=12, help="runs at a time (12)")
    parser.add_argument("--until-found", action="store_true", help="ends with the first run that finds something")
    parser.add_argument("--replay", metavar="KIND:NUMBER", help="one run; --runs so many times")
    return driver.run(parser.parse_args())


if __name__ == "__main__":
    find_packages()
    sys.exit(main())
