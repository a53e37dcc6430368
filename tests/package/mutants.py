"""Mutants, that is deliberate bugs, of csrc/core: replaces a piece of source text and checks that a simulator
(tests/core/*_hunt.cc) then fails."""

import pathlib
import subprocess
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parent.parent.parent
_INCLUDES = ["-I", str(ROOT), "-I", str(ROOT / "csrc")]

PROGRAMS = 60_000
"""How many random programs the simulator runs at most. One of the first thousand finds most mutants."""


class Mutant(NamedTuple):
    """A bug: in `file` of csrc/core, the first `old` is replaced by `new`."""

    old: str
    new: str
    file: str


class Simulator:
    """A simulator's program, NAME_hunt, rebuilt for each mutant."""

    def __init__(self, name: str, folder: pathlib.Path, parts: tuple[str, ...], machine: tuple[str, ...]) -> None:
        """parts: the files tests/core/NAME_PART.cc. machine: the files of csrc/core that mutants change."""
        self.program = folder / "mutant" / f"{name}_hunt"
        self._folder, self._machine = folder, machine
        for part in parts:
            source = ROOT / f"tests/core/{name}_{part}.cc"
            _run("g++", "-std=c++17", "-O1", *_INCLUDES, "-c", source, "-o", folder / f"{part}.cc.o")

    def compile_core(self, *files: str) -> None:
        """Compiles the files of csrc/core that no mutant changes."""
        for name in files:
            _run(
                "gcc", "-std=c11", "-O1", *_INCLUDES, "-c", ROOT / "csrc/core" / name, "-o", self._folder / f"{name}.o"
            )

    def hunt(self, mutant: Mutant | None) -> "subprocess.CompletedProcess[str]":
        """Builds the program with the mutant, or without any, and runs it."""
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
