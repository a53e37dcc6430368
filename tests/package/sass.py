"""Reads the machine code of the CUDA library for sm_90, with cuobjdump and nvdisasm, and finds the shortest path once
around a loop.

The code does not tell which path through a loop a kernel takes. So a path is specified by conditions: the instruction
where it begins and ends, an operand that occurs on it, how many bytes it reads. The shortest path that meets them is
the common case, provided that uncommon cases take longer.
"""

import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

ROOT = pathlib.Path(os.path.abspath(__file__)).parents[2]
LIBRARIES = (ROOT / "cuda/libtorch_ext_cuda.so", ROOT / "bazel-bin/cuda/libtorch_ext_cuda.so")


_PREDICATES = {f"P{i}" for i in range(7)}


class Instruction(NamedTuple):
    """One machine instruction."""

    address: int
    predicated: bool
    operation: str
    """The name with its modifiers: "STG.E.128"."""
    operands: str

    @property
    def name(self) -> str:
        return self.operation.split(".")[0]

    @property
    def bytes_read(self) -> int:
        """How many bytes one lane reads from global memory."""
        if self.name != "LDG":
            return 0
        sizes = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
        return next((sizes[word] for word in self.operation.split(".") if word in sizes), 4)


def is_misread_clamp(one: Instruction) -> bool:
    """Whether it is a minimum or maximum clamped at 0 that sets a predicate."""
    outputs = one.operands.split(", ")[1:3]
    return one.operation.startswith("VIMNMX") and "RELU" in one.operation and bool({*outputs} & _PREDICATES)


def _folders() -> Iterator[str]:
    """Yields the folders in which CUDA's tools may be: of a toolkit, and of NVIDIA's Python packages."""
    yield "/usr/local/cuda/bin"
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        yield os.path.join(folder, "cu13", "bin")


def why_not() -> str:
    """Returns what is missing on this machine to read the machine code; "" if nothing is."""
    if not any(path.exists() for path in LIBRARIES):
        return "libtorch_ext_cuda.so is not built: there is no nvcc on this machine"
    for program in ("cuobjdump", "nvdisasm"):
        if shutil.which(program, path=_path()) is None:
            return f"{program} is not installed (pip install nvidia-cuda-{program})"
    return ""


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", ""), *_folders()])


def cuobjdump(*arguments: str, architecture: str = "sm_90") -> str:
    """Returns the output of cuobjdump for the library."""
    library = next(path for path in LIBRARIES if path.exists())
    command = [str(shutil.which("cuobjdump", path=_path())), "-arch", architecture, *arguments, str(library)]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, env=os.environ | {"PATH": _path()}
    ).stdout


def usage(architecture: str = "sm_90") -> dict[str, dict[str, int]]:
    """Returns mangled name of every kernel -> its resource usage (REG, STACK ...)."""
    found = re.findall(r"Function (\S*):\s+(REG:.*)", cuobjdump("--dump-resource-usage", architecture=architecture))
    return {name: {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", fields)} for name, fields in found}


def shared_alignments(architecture: str = "sm_90") -> dict[str, int]:
    """Returns mangled name of every kernel that has shared memory of a fixed size -> what that is aligned to, in
    bytes."""
    sections = re.findall(
        r"\s([0-9a-f]+)\s+NOBITS\s.*\s\.nv\.shared\.(_Z\S+)", cuobjdump("-elf", architecture=architecture)
    )
    return {name: int(alignment, 16) for alignment, name in sections}


def code_of(
    names: Sequence[str], architecture: str = "sm_90", only: Sequence[str] = ()
) -> dict[str, list[Instruction]]:
    """Returns the instructions of kernels, by mangled name. only: instructions to which the others are not added; to
    read all of all kernels takes long."""
    found: dict[str, list[Instruction]] = {}
    current: list[Instruction] = []
    wanted = re.compile("|".join(["Function :", *only]) if only else "")
    lines = cuobjdump("-sass", "-fun", ",".join(names), architecture=architecture).splitlines()
    for line in filter(wanted.search, lines):
        if function := re.match(r"\s*Function : (\S+)", line):
            current = found.setdefault(function[1], [])
        elif m := re.match(r"\s*/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)\s*(.*?);", line):
            current.append(Instruction(int(m[1], 16), bool(m[2]), m[3], m[4]))
    return found


def _successors(code: Sequence[Instruction]) -> list[list[int]]:
    """Returns, for each instruction, the positions of the instructions that may run next."""
    at = {one.address: i for i, one in enumerate(code)}
    meets: dict[str, int] = {}  # barrier -> the position where its lanes reconverge
    found = []
    for i, one in enumerate(code):
        after = [i + 1] if i + 1 < len(code) else []
        targets = [at[int(t, 16)] for t in re.findall(r"0x[0-9a-f]+", one.operands)[-1:] if int(t, 16) in at]
        first = re.split(r"[\s,]+", one.operands)[0]
        if one.name == "BSSY":
            meets[first] = targets[0]
        if one.name == "BSYNC":
            found.append([meets[first], *(after if one.predicated else [])])
        elif one.name == "BRA":
            conditional = one.predicated or ".DIV" in one.operation or re.match(r"!?U?P\d", first)
            found.append([*targets, *(after if conditional else [])])
        elif one.name in ("EXIT", "RET", "BRX", "BPT"):
            found.append(after if one.predicated else [])
        else:
            found.append(after)
    return found


Passes = Callable[[Instruction], bool]
_Node = tuple[int, int, int]  # position, bytes read before it, how many of `passes` were met before it


def shortest_cycle(code: Sequence[Instruction], start: int, reads: int = 0, passes: Sequence[Passes] = ()) -> list[int]:
    """Returns the shortest path from `start` back to `start`, as positions; empty if there is none. On it, a lane reads
    at least `reads` bytes, and there is an instruction that meets the first of `passes`, one after it that meets the
    second, and so on."""
    following = _successors(code)

    def seen(i: int, read: int, passed: int) -> tuple[int, int]:
        met = passed < len(passes) and passes[passed](code[i])
        return min(reads, read + code[i].bytes_read), passed + met

    first = seen(start, 0, 0)
    before: dict[_Node, _Node | None] = {(i, *first): None for i in following[start]}
    queue = deque(before)
    while queue:
        node = queue.popleft()
        i, read, passed = node
        if i == start:
            if (read, passed) == (reads, len(passes)):
                return [start, *_path_to(before, node)]
            continue
        now = seen(*node)
        for j in following[i]:
            then = (j, *now)
            if then not in before:
                before[then] = node
                queue.append(then)
    return []


def _path_to(before: dict[_Node, _Node | None], node: _Node) -> list[int]:
    """Returns the positions of a node's predecessors, the first one first."""
    way = []
    previous = before[node]
    while previous is not None:
        way.append(previous[0])
        previous = before[previous]
    return way[::-1]
