"""The library's C sources and their compiler flags, for tests that compile them with clang."""

import os
import pathlib
import platform
import re
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

ROOT = pathlib.Path(__file__).parent.parent
CLANG = shutil.which("clang")

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def starlark(path: str) -> dict[str, Any]:
    """Returns the constants of a .bzl file, by running it as Python."""
    names: dict[str, Any] = {}
    exec((ROOT / path).read_text(), names)
    return names


ISAS: dict[str, list[str]] = starlark("bazel/isa.bzl")["ISAS"][platform.machine()]


def _processor() -> set[str]:
    """Returns the instruction sets of this processor, by the compiler's names; empty if they are not known."""
    try:
        found = re.search(r"^flags\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        found = None
    return set(found[1].replace("_", "").split()) if found else set()


_PROCESSOR = _processor()


class Source(NamedTuple):
    path: str
    """From the repository's root."""
    flags: list[str]

    @property
    def name(self) -> str:
        isa = [flag.removeprefix("-DTX_ISA=") for flag in self.flags if flag.startswith("-DTX_ISA=")]
        return "-".join([pathlib.Path(self.path).stem, *isa])

    @property
    def runs_here(self) -> bool:
        """Whether this processor has the instructions that the flags allow. What it cannot run need not be compiled
        well, which takes long."""
        allowed = {flag[2:] for flag in self.flags if re.fullmatch(r"-m[a-z0-9]+", flag)}
        return allowed <= (_PROCESSOR or allowed)


def library_sources(folders: list[str]) -> list[Source]:
    """Returns the C files of `folders` with the flags of the build, without optimisation. A file *kernels_isa.c is
    listed once for each instruction set."""
    flags = starlark("bazel/copts.bzl")["C_OPTS"]
    paths = sorted(str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / folder).glob("*.c"))
    assert paths
    return [
        Source(path, [*flags, *more])
        for path in paths
        for more in (
            [["-DTX_ISA=" + isa, *of_isa] for isa, of_isa in ISAS.items()] if path.endswith("kernels_isa.c") else [[]]
        )
    ]


def clang(*arguments: str) -> None:
    """Runs clang. Raises AssertionError with clang's output if it fails."""
    command = [str(CLANG), "-fPIC", "-I.", "-Icsrc", *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stderr}"


def in_parallel(work: Callable[[_Item], _Result], items: list[_Item]) -> list[_Result]:
    """Returns `work(item)` for all items, computed by as many threads as there are cores."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(work, items))
