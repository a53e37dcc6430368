"""Machine code of a CUDA library for sm_90, read by cuobjdump and nvdisasm, and the shortest way once round a loop.

Which of a loop's ways a kernel takes is not to be seen in its code, so a way is named by what it must pass: the
instruction that it begins and ends at, an operand, bytes that are read. The shortest such way is that of the common
case, wherever what is uncommon is longer.
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


class Instruction(NamedTuple):
    address: int
    predicated: bool
    operation: str
    """With what follows it: "STG.E.128"."""
    operands: str

    @property
    def name(self) -> str:
        return self.operation.split(".")[0]

    @property
    def bytes_read(self) -> int:
        """From memory, by one lane."""
        if self.name != "LDG":
            return 0
        sizes = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
        return next((sizes[word] for word in self.operation.split(".") if word in sizes), 4)


def _folders() -> Iterator[str]:
    yield "/usr/local/cuda/bin"
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        yield os.path.join(folder, "cu13", "bin")


def why_not() -> str:
    """What is missing here to read any of it; empty where nothing is."""
    if not any(path.exists() for path in LIBRARIES):
        return "libtorch_ext_cuda.so is not built: there is no nvcc on this machine"
    for program in ("cuobjdump", "nvdisasm"):
        if shutil.which(program, path=_path()) is None:
            return f"{program} is not installed (pip install nvidia-cuda-{program})"
    return ""


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", ""), *_folders()])


def cuobjdump(*arguments: str, architecture: str = "sm_90") -> str:
    """What it says of the library."""
    library = next(path for path in LIBRARIES if path.exists())
    command = [str(shutil.which("cuobjdump", path=_path())), "-arch", architecture, *arguments, str(library)]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, env=os.environ | {"PATH": _path()}
    ).stdout


def usage(architecture: str = "sm_90") -> dict[str, dict[str, int]]:
    """Mangled name of every kernel -> REG, STACK ..."""
    found = re.findall(r"Function (\S*):\s+(REG:.*)", cuobjdump("--dump-resource-usage", architecture=architecture))
    return {name: {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", fields)} for name, fields in found}


def code_of(names: Sequence[str]) -> dict[str, list[Instruction]]:
    """By mangled name."""
    found: dict[str, list[Instruction]] = {}
    current: list[Instruction] = []
    for line in cuobjdump("-sass", "-fun", ",".join(names)).splitlines():
        if function := re.match(r"\s*Function : (\S+)", line):
            current = found.setdefault(function[1], [])
        elif m := re.match(r"\s*/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)\s*(.*?);", line):
            current.append(Instruction(int(m[1], 16), bool(m[2]), m[3], m[4]))
    return found


def _next(code: Sequence[Instruction]) -> list[list[int]]:
    """What may run after each instruction, as positions."""
    at = {one.address: i for i, one in enumerate(code)}
    meets: dict[str, int] = {}  # barrier -> where its lanes meet again
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
_Node = tuple[int, int, bool]  # position, bytes read before it, whether something has passed


def way_round(code: Sequence[Instruction], start: int, reads: int = 0, passes: Passes | None = None) -> list[int]:
    """The fewest instructions from `start` back to it, as positions, on which a lane reads at least so many bytes and
    something passes; empty where there is no such way."""
    following = _next(code)

    def seen(i: int, read: int, passed: bool) -> tuple[int, bool]:
        return min(reads, read + code[i].bytes_read), passed or (passes is not None and passes(code[i]))

    first = seen(start, 0, passes is None)
    before: dict[_Node, _Node | None] = {(i, *first): None for i in following[start]}
    queue = deque(before)
    while queue:
        node = queue.popleft()
        i, read, passed = node
        if i == start:
            if (read, passed) == (reads, True):
                return [start, *_back(before, node)]
            continue
        now = seen(*node)
        for j in following[i]:
            then = (j, *now)
            if then not in before:
                before[then] = node
                queue.append(then)
    return []


def _back(before: dict[_Node, _Node | None], node: _Node) -> list[int]:
    way = []
    previous = before[node]
    while previous is not None:
        way.append(previous[0])
        previous = before[previous]
    return way[::-1]
