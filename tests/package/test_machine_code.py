"""The machine code of the step for sm_90: what the compiler made of it, within limits that a change must not pass
unnoticed. Read by cuobjdump and nvdisasm, of a CUDA toolkit or of the packages of their names; no GPU is needed."""

import collections
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import NamedTuple

import pytest

ROOT = pathlib.Path(os.path.abspath(__file__)).parents[2]
LIBRARIES = (ROOT / "cuda/libtorch_ext_cuda.so", ROOT / "bazel-bin/cuda/libtorch_ext_cuda.so")


class Limits(NamedTuple):
    """Of one kernel. Two blocks of 256 threads run on a processor with up to 128 registers."""

    registers: int
    stack: int  # bytes; what is spilled lies there
    spills: int  # instructions that move it
    instructions: int  # of the whole kernel, its slow paths included
    asked: int  # streams that are asked for ahead


# (row of TX_FOR_EACH_WEIGHT, kind of moments) of each configuration of the benchmark
KERNELS = {"fp32": (0, 0), "bf16": (2, 1), "bf16_remainder": (3, 1), "8bit": (3, 2)}
LIMITS = {
    "fp32": Limits(106, 0, 0, 5400, 4),
    "bf16": Limits(126, 0, 0, 9200, 4),
    "bf16_remainder": Limits(122, 0, 0, 7200, 5),
    "8bit": Limits(128, 40, 28, 8000, 5),
}


def _folders() -> Iterator[str]:
    yield "/usr/local/cuda/bin"
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        yield os.path.join(folder, "cu13", "bin")


@pytest.fixture(scope="module")
def library() -> pathlib.Path:
    found = next((path for path in LIBRARIES if path.exists()), None)
    if found is None:
        pytest.skip("libtorch_ext_cuda.so is not built: there is no nvcc on this machine")
    return found


@pytest.fixture(scope="module")
def tools() -> str:
    """The PATH on which both are."""
    path = os.pathsep.join([os.environ.get("PATH", ""), *_folders()])
    for program in ("cuobjdump", "nvdisasm"):
        if shutil.which(program, path=path) is None:
            pytest.skip(f"{program} is not installed (pip install nvidia-cuda-{program})")
    return path


def _run(tools: str, *arguments: str) -> str:
    command = [str(shutil.which("cuobjdump", path=tools)), "-arch", "sm_90", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | {"PATH": tools}).stdout


class Kernel(NamedTuple):
    registers: int
    stack: int
    instructions: dict[str, int]  # operation, with what follows it ("STG.E.128") -> how many


@pytest.fixture(scope="module")
def kernels(library: pathlib.Path, tools: str) -> dict[str, Kernel]:
    """By configuration."""
    usage = dict(
        re.findall(r"Function (\S*4stepILi\d\S*):\s+(REG:.*)", _run(tools, "--dump-resource-usage", str(library)))
    )
    names = {
        name: next(f for f in usage if f"stepILi{weight}ELi{moments}E" in f and "tx_plain_entry" in f)
        for name, (weight, moments) in KERNELS.items()
    }
    found: dict[str, collections.Counter[str]] = {}
    current: collections.Counter[str] = collections.Counter()
    for line in _run(tools, "-sass", "-fun", ",".join(names.values()), str(library)).splitlines():
        if function := re.match(r"\s*Function : (\S+)", line):
            current = found.setdefault(function[1], collections.Counter())
        elif instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", line):
            current[instruction[1]] += 1
    made = {}
    for name, function in names.items():
        fields = {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", usage[function])}
        made[name] = Kernel(fields["REG"], fields["STACK"], found[function])
    return made


def _count(kernel: Kernel, *operations: str) -> int:
    return sum(n for name, n in kernel.instructions.items() if name.split(".")[0] in operations)


@pytest.mark.parametrize("name", LIMITS)
def test_a_step_keeps_within_its_registers_and_instructions(name: str, kernels: dict[str, Kernel]) -> None:
    kernel, limits = kernels[name], LIMITS[name]
    measured = Limits(
        kernel.registers,
        kernel.stack,
        _count(kernel, "LDL", "STL"),
        sum(kernel.instructions.values()),
        _count(kernel, "UBLKPF"),
    )
    assert all(is_ <= limit for is_, limit in zip(measured, limits, strict=True)), f"{measured}, limits {limits}"
    assert measured.asked == limits.asked, "every stream that is read, and no other"


@pytest.mark.parametrize("name", LIMITS)
def test_whole_vectors_move_in_16_bytes(name: str, kernels: dict[str, Kernel]) -> None:
    """A round reads all of its streams at once, the widest way that their bytes allow."""
    wide = {"fp32": 8, "bf16": 4, "bf16_remainder": 4, "8bit": 3}  # streams of 16 bytes a lane, fp32 twice
    for operation in ("LDG", "STG"):
        found = sum(n for each, n in kernels[name].instructions.items() if re.match(rf"{operation}\S*\.128", each))
        assert found >= wide[name] - (operation == "STG"), operation
