"""Mistakes that are put into csrc/core, as changes of its text, for a simulator to find (tests/core/*_hunt.cc)."""

import pathlib
import subprocess
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parent.parent.parent
_INCLUDES = ["-I", str(ROOT), "-I", str(ROOT / "csrc")]

PROGRAMS = 60_000
"""At most: most mutants are found by one of the first thousand."""


class Mutant(NamedTuple):
    """In `file` of csrc/core, `old` becomes `new`."""

    old: str
    new: str
    file: str


class Simulator:
    """A hunt, built again for each mutant."""

    def __init__(self, name: str, folder: pathlib.Path, parts: tuple[str, ...], machine: tuple[str, ...]) -> None:
        """parts: of tests/core, NAME_PART.cc. machine: the files of csrc/core in which mutants are."""
        self.program = folder / "mutant" / f"{name}_hunt"
        self._folder, self._machine = folder, machine
        for part in parts:
            source = ROOT / f"tests/core/{name}_{part}.cc"
            _run("g++", "-std=c++17", "-O1", *_INCLUDES, "-c", source, "-o", folder / f"{part}.cc.o")

    def compile_core(self, *files: str) -> None:
        """Files of csrc/core that are as they are."""
        for name in files:
            _run(
                "gcc", "-std=c11", "-O1", *_INCLUDES, "-c", ROOT / "csrc/core" / name, "-o", self._folder / f"{name}.o"
            )

    def hunt(self, mutant: Mutant | None) -> "subprocess.CompletedProcess[str]":
        own = self.program.parent
        own.mkdir(exist_ok=True)
        for name in self._machine:
            text = (ROOT / "csrc/core" / name).read_text()
            if mutant is not None and name == mutant.file:
                assert text.count(mutant.old) >= 1, "the mutant's line is not there any more: follow the change"
                text = text.replace(mutant.old, mutant.new, 1)
            (own / name).write_text(text)
            _run("gcc", "-std=c11", "-O1", *_INCLUDES, "-c", own / name, "-o", own / f"{name}.o")
        _run("g++", *self._folder.glob("*.o"), *own.glob("*.o"), "-o", self.program)
        return self.run_seeds(0, PROGRAMS if mutant is not None else 2000)

    def run_seeds(self, first: int, last: int) -> "subprocess.CompletedProcess[str]":
        return subprocess.run([self.program, str(first), str(last)], capture_output=True, text=True, timeout=300)


def _run(*command: object) -> None:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
