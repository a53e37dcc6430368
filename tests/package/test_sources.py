"""What the folders promise: includes and imports go down only, and a file's name says which file is meant."""

import collections
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent

# Room -> the rooms whose headers it may include, beside its own and the public header.
ARROWS = {
    "core": set(),
    "math": set(),
    "cpu": {"core", "math"},
    "ops": {"core", "cpu", "math"},
    "torch": {"core", "ops"},
}

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
    files = [path for path in sources(f"csrc/{room}") if path.suffix in (".c", ".h", ".def", ".inc")]
    assert files
    upwards = []
    for path in files:
        for name in includes(path):
            below = re.match(r"csrc/(\w+)/", name)
            if below and below[1] not in ARROWS[room] | {room}:
                upwards.append(f"{path.relative_to(ROOT)} includes {name}")
    assert not upwards


def test_the_public_header_stands_alone() -> None:
    assert set(includes(ROOT / "csrc/torch_ext.h")) <= {"stddef.h", "stdint.h", "policy.def"}


@pytest.mark.parametrize("room", ["core", "math", "cpu"])
def test_rooms_below_torch_use_libc_alone(room: str) -> None:
    """Neither threads, nor dlopen, nor printing: the caller brings the threads, and messages go into tx_error."""
    forbidden = {"pthread.h", "threads.h", "dlfcn.h", "omp.h"}
    found = [
        f"{p.relative_to(ROOT)}: {name}" for p in sources(f"csrc/{room}") for name in includes(p) if name in forbidden
    ]
    assert not found


def test_the_library_prints_and_exits_nowhere() -> None:
    calls = re.compile(r"\b(printf|puts|putchar|fprintf|perror|exit|abort|_Exit)\s*\(")
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sources("csrc")
        if path.suffix in (".c", ".h")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if calls.search(line)
    ]
    assert not found


def test_file_names_are_unique() -> None:
    folders = ["bazel", "csrc", "examples", "tests", "torch_ext"]
    by_name = collections.defaultdict(list)
    for folder in folders:
        for path in sources(folder):
            if path.name not in FIXED_NAMES:
                by_name[path.name].append(str(path.relative_to(ROOT)))
    assert len(by_name) > 20
    assert not {name: paths for name, paths in by_name.items() if len(paths) > 1}
