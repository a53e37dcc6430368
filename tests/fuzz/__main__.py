"""python tests/fuzz SECONDS [--targets dtype policy ...] [--seed S] [--keep | --mutants]: runs fuzz targets for so many
seconds in total, two at a time. Prints one line for each target at the end. If something was found, prints it with its
input and exits with status 1."""

import argparse
import pathlib
import sys
import tempfile

_HERE = pathlib.Path(__file__).absolute().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent)]

import fuzz_mutants  # noqa: E402
import fuzzing  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/fuzz", description=__doc__)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--targets", nargs="+", choices=fuzzing.targets(), default=fuzzing.targets(), metavar="TARGET")
    parser.add_argument("--seed", type=int, default=1)
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--keep", action="store_true", help="inputs that lead to other lines go into tests/fuzz/corpus"
    )
    instead.add_argument(
        "--mutants",
        action="store_true",
        help="instead, for each target whose kept inputs do not find its mutant, searches at most SECONDS for one",
    )
    arguments = parser.parse_args()
    if why_not := fuzzing.why_not():
        print(f"fuzz: nothing was run: {why_not}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="torch_ext_fuzz.") as name:
        folder = pathlib.Path(name)
        programs = fuzzing.build(folder, arguments.targets)
        if arguments.mutants:
            return _keep_mutants(arguments, folder)
        found = fuzzing.run_all(programs, arguments.seconds, folder, arguments.seed)
        for one in found.values():
            if one.problem:
                print(f"{one.target}:\n{one.problem}")
            elif arguments.keep:
                fuzzing.keep(one.target, programs[one.target], folder / f"{one.target}.grown")
        for one in found.values():
            print(f"{one.target:14} {one.runs:9} inputs: {'FOUND, see above' if one.problem else 'nothing found'}")
    return int(any(one.problem for one in found.values()))


def _keep_mutants(arguments: argparse.Namespace, folder: pathlib.Path) -> int:
    def keep(target: str) -> bool:
        return fuzz_mutants.keep_one(target, fuzz_mutants.build(target, folder), arguments.seconds, arguments.seed)

    kept = fuzzing.in_parallel(keep, arguments.targets)
    for target, is_found in zip(arguments.targets, kept, strict=True):
        print(f"{target:14} {'a kept input finds its mutant' if is_found else 'its mutant was NOT FOUND'}")
    return int(not all(kept))


if __name__ == "__main__":
    sys.exit(main())
