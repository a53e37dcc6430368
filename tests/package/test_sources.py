"""What the folders promise: includes and imports go down only, and a file's name says which file is meant."""

import collections
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent

# Room -> the rooms and single headers that it may include, beside its own and the public header.
ARROWS = {
    "csrc/core": set(),
    "csrc/math": set(),
    "csrc/cpu": {"csrc/core", "csrc/math"},
    "csrc/nccl": {"csrc/core"},
    "csrc/ops": {"csrc/core", "csrc/cpu", "csrc/math"},
    "csrc/torch": {"csrc/core", "csrc/ops", "cuda/torch_ext_cuda.h"},  # the library for GPUs is loaded, not linked
    "cuda": {"csrc/core", "csrc/math", "csrc/ops"},
}
C_SUFFIXES = (".c", ".h", ".def", ".inc", ".cu")

# Names that tools give to one file per folder.
FIXED_NAMES = {"BUILD", "WORKSPACE", "README.md", "__init__.py", ".bazelrc", "run.sh", "conftest.py"}


def sources(folder: str) -> list[pathlib.Path]:
    """Without what tools leave behind: __pycache__ and hidden folders."""
    files = sorted(path for path in (ROOT / folder).rglob("*") if path.is_file())
    return [path for path in files if not re.search(r"/(\.|__pycache__)[^/]*/", f"/{path.relative_to(ROOT)}")]


def includes(path: pathlib.Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s+[<"]([^>"]+)[>"]', path.read_text(), flags=re.MULTILINE)


@pytest.mark.parametrize("room", ARROWS)
def test_includes_go_down_only(room: str) -> None:
    files = [path for path in sources(room) if path.suffix in C_SUFFIXES]
    assert files
    upwards = []
    for path in files:
        for name in includes(path):
            below = re.match(r"(csrc/\w+|cuda)/", name)
            if below and not {below[1], name} & (ARROWS[room] | {room}):
                upwards.append(f"{path.relative_to(ROOT)} includes {name}")
    assert not upwards


@pytest.mark.parametrize(
    ("header", "may_include"),
    [("csrc/torch_ext.h", {"stddef.h", "stdint.h", "policy.def"}), ("cuda/torch_ext_cuda.h", {"torch_ext.h"})],
)
def test_the_public_headers_stand_alone(header: str, may_include: set[str]) -> None:
    assert set(includes(ROOT / header)) <= may_include


def test_the_cuda_library_has_the_checks_of_the_operators_and_not_what_runs_them() -> None:
    found = {name for path in sources("cuda") if path.suffix in C_SUFFIXES for name in includes(path)}
    assert {name for name in found if name.startswith("csrc/ops/")} <= {
        "csrc/ops/check.h",
        "csrc/ops/checks.h",
        "csrc/ops/tensor.h",
    }


@pytest.mark.parametrize("room", ["csrc/core", "csrc/math", "csrc/cpu"])
def test_rooms_below_torch_use_libc_alone(room: str) -> None:
    """Neither threads, nor dlopen, nor printing: the caller brings the threads, and messages go into tx_error."""
    forbidden = {"pthread.h", "threads.h", "dlfcn.h", "omp.h"}
    found = [f"{p.relative_to(ROOT)}: {name}" for p in sources(room) for name in includes(p) if name in forbidden]
    assert not found


def test_the_library_prints_and_exits_nowhere() -> None:
    calls = re.compile(r"\b(printf|puts|putchar|fprintf|perror|exit|abort|_Exit)\s*\(")
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sources("csrc") + sources("cuda")
        if path.suffix in C_SUFFIXES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if calls.search(line)
    ]
    assert not found


def test_file_names_are_unique() -> None:
    folders = ["bazel", "csrc", "cuda", "examples", "tests", "torch_ext"]
    by_name = collections.defaultdict(list)
    for folder in folders:
        for path in sources(folder):
            if path.name not in FIXED_NAMES:
                by_name[path.name].append(str(path.relative_to(ROOT)))
    assert len(by_name) > 20
    assert not {name: paths for name, paths in by_name.items() if len(paths) > 1}
