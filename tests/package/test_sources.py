"""Tests rules of the sources: includes and imports go from upper to lower folders only, file names are unique, classes
and functions are short, tests use public names."""

import ast
import collections
import pathlib
import re
from collections.abc import Container

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent

# Room, which is a folder of C sources -> the rooms and single headers that it may include, besides its own headers and
# the public ones.
ARROWS = {
    "csrc/core": set(),
    "csrc/math": set(),
    "csrc/cpu": {"csrc/core", "csrc/math"},
    "csrc/nccl": {"csrc/core"},
    "csrc/ops": {"csrc/core", "csrc/cpu", "csrc/math"},
    "csrc/torch": {"csrc/core", "csrc/ops"},  # the library for GPUs is loaded, not linked
    "cuda": {"csrc/core", "csrc/math", "csrc/ops"},
}
C_SUFFIXES = (".c", ".h", ".def", ".inc", ".cu")

# File names that tools prescribe, so that several folders have them.
FIXED_NAMES = {"BUILD", "WORKSPACE", "README.md", "__init__.py", "__main__.py", ".bazelrc", "run.sh", "conftest.py"}


def sources(folder: str) -> list[pathlib.Path]:
    """Returns the files below a folder, without __pycache__ and hidden folders, which tools leave behind."""
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


# Package -> the packages below it that it may import. All imports count, also those within functions and for type
# checkers. `__init__.py` has the public names and may import all packages.
PACKAGES = {
    "native": set(),
    "tensors": {"native"},
    "policy": {"native"},
    "comm": {"native", "policy"},
    "grads": {"comm", "native", "tensors"},
    "params": {"comm", "grads", "native", "policy", "tensors"},
    "optim": {"comm", "grads", "native", "params", "policy", "tensors"},
    "parallel": {"comm", "grads", "native", "optim", "params", "policy", "tensors"},
    "amp": {"comm", "grads", "native", "optim", "params", "policy", "tensors"},
    "weight_sync": {"comm", "grads", "native", "optim", "params", "tensors"},
    "checkpoint": {"native", "optim", "params", "tensors", "weight_sync"},
    "offloading": {"native", "optim", "parallel", "params", "tensors"},
    "integrations": {"optim", "params"},
    "diagnosis": {"optim", "params", "policy", "tensors"},
    "cli": {"checkpoint", "comm", "diagnosis", "native", "optim", "parallel", "policy"},
}


def python_modules() -> dict[str, pathlib.Path]:
    """Returns the modules of the package torch_ext: dotted name -> file."""
    found = {}
    for path in sources("torch_ext"):
        if path.suffix == ".py":
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def python_imports(path: pathlib.Path, modules: Container[str]) -> set[str]:
    """Returns the modules of torch_ext that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide an arrow"
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in names if name in modules and name != "torch_ext"}


def test_imports_go_down_only() -> None:
    modules = python_modules()
    packages = {name.split(".")[1] for name in modules if name.count(".") > 1}
    assert packages == set(PACKAGES)
    upwards = [
        f"{name} imports {imported}"
        for name, path in modules.items()
        if name.count(".") > 0 and name != "torch_ext.__main__"
        for imported in sorted(python_imports(path, modules))
        if imported.split(".")[1] not in PACKAGES[name.split(".")[1]] | {name.split(".")[1]}
    ]
    assert not upwards


def test_no_modules_import_each_other_in_a_circle() -> None:
    modules = python_modules()
    left = {name: python_imports(path, modules) - {name} for name, path in modules.items()}
    while free := {name for name, imports in left.items() if not imports & left.keys()}:
        left = {name: imports for name, imports in left.items() if name not in free}
    assert not left, "these are in a circle, or above one"


MOST_LINES: dict[type[ast.AST], int] = {ast.ClassDef: 200, ast.FunctionDef: 60, ast.AsyncFunctionDef: 60}


def test_classes_and_functions_are_short() -> None:
    too_long = [
        f"{name}.{node.name}: {lines} lines"
        for name, path in python_modules().items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or 0) - node.lineno + 1) > MOST_LINES[type(node)]
    ]
    assert not too_long


def test_packages_are_listed_from_the_bottom() -> None:
    order = list(PACKAGES)
    assert [name for name, below in PACKAGES.items() if below & set(order[order.index(name) :])] == []


# Public header -> what it includes: standard headers and public headers only.
HEADERS = {
    "torch_ext_types.h": {"stddef.h", "stdint.h"},
    "torch_ext_operators.h": {"torch_ext_types.h"},
    "torch_ext_policy.h": {"torch_ext_types.h", "policy.def"},
    "torch_ext_bindings.h": {"torch_ext_types.h"},
    "torch_ext_muon.h": {"torch_ext_operators.h"},
    "torch_ext.h": {f"torch_ext_{part}.h" for part in ("types", "operators", "muon", "policy", "bindings")},
    "torch_ext_plan.h": {"torch_ext_types.h"},
    "torch_ext_muon_exchange.h": {"torch_ext_types.h"},
    "torch_ext_memory.h": {"torch_ext_plan.h", "torch_ext_muon_exchange.h"},
    "torch_ext_compress.h": {"torch_ext_types.h"},
    "torch_ext_staging.h": {"torch_ext_operators.h"},
    "torch_ext_nccl.h": {"torch_ext_types.h"},
    "torch_ext_advanced.h": {"torch_ext.h"}
    | {f"torch_ext_{part}.h" for part in ("plan", "muon_exchange", "memory", "compress", "staging", "nccl")},
    "torch_ext_cycle.h": {"torch_ext_types.h"},
    "torch_ext_delta.h": {"torch_ext_types.h"},
    "torch_ext_cuda.h": {"torch_ext_advanced.h"},
}


@pytest.mark.parametrize("header", HEADERS)
def test_a_public_header_includes_what_it_says(header: str) -> None:
    assert set(includes(ROOT / "csrc" / header)) == HEADERS[header]


def test_every_public_header_is_known() -> None:
    assert {path.name for path in (ROOT / "csrc").glob("*.h")} == set(HEADERS)


def test_the_cuda_library_has_the_checks_of_the_operators_and_not_what_runs_them() -> None:
    found = {name for path in sources("cuda") if path.suffix in C_SUFFIXES for name in includes(path)}
    assert {name for name in found if name.startswith("csrc/ops/")} <= {
        "csrc/ops/check.h",
        "csrc/ops/operator_checks.h",
        "csrc/ops/step_outputs.h",
        "csrc/ops/tensor.h",
    }


@pytest.mark.parametrize("room", ["csrc/core", "csrc/math", "csrc/cpu"])
def test_rooms_below_torch_use_libc_alone(room: str) -> None:
    """These rooms use no threads, no dlopen and no printing: the caller brings the threads, and messages go into
    tx_error."""
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
    folders = ["bazel", "csrc", "cuda", "docs", "examples", "tests", "torch_ext"]
    by_name = collections.defaultdict(list)
    for folder in folders:
        for path in sources(folder):
            # tests/torch/saved, tests/fuzz/corpus: data, not sources
            if path.name not in FIXED_NAMES and not {"saved", "corpus"} & set(path.parts):
                by_name[path.name].append(str(path.relative_to(ROOT)))
    assert len(by_name) > 20
    assert not {name: paths for name, paths in by_name.items() if len(paths) > 1}


# The tests that depend on private modules, and what they test there, for which there is no public name. Everything that
# is visible through the names in torch_ext/__init__.py, torch.ops.torch_ext or the C API has to be tested through
# these. Add no rows.
PRIVATE_NAMES: dict[str, str] = {
    # helpers, which replace parts of private modules for several tests
    "tests/distributed/folders.py": "an operating system whose processes are killed at any operation on files",
    "tests/distributed/happens_before.py": "devices and streams where there is no GPU",
    "tests/distributed/internals.py": "sums that are late, buckets that travel two by two",
    "tests/gpu/exchange.py": "streams that sleep, and the transport over NCCL by itself",
    "tests/host_parts.py": "copies between host and device that are late",
    # parts that public names do not expose by themselves
    "tests/distributed/test_coalescing.py": "what the measured link decides, and what is joined",
    "tests/distributed/test_communicators.py": "communicators, their messages and memory",
    "tests/distributed/test_compressed_wire.py": "messages by their sizes, and what is damaged",
    "tests/distributed/test_fsdp_units.py": "which modules share a unit",
    "tests/distributed/test_memory_plan.py": "the planner of `python -m torch_ext plan`, against what is allocated",
    "tests/distributed/muon_programs.py": "matrices before their products are made",
    "tests/distributed/test_nccl.py": "the transport over NCCL, with a library that is none",
    "tests/distributed/test_streams.py": "the order of streams, and what is found where it is wrong",
    "tests/distributed/test_streams_fsdp2.py": "the same under FSDP2",
    "tests/torch/test_abi.py": "mirrors of C structs, statuses as exceptions",
    "tests/torch/test_boxes.py": "runs of memory as boxes, and the size of boxes",
    "tests/torch/test_in_use.py": "whether running code holds an object",
    "tests/torch/test_operators_in_torch.py": "the package's own way to call operators",
    "tests/torch/test_staging.py": "memory and copies of the part on the host",
    # what happens inside of a training
    "tests/distributed/test_folder_crash.py": "an exception at each line of the modules that write a folder",
    "tests/distributed/test_fsdp_faults.py": "how many units may be on their way",
    "tests/distributed/test_fsdp_training.py": "when weights are gathered",
    "tests/distributed/test_interrupts.py": "an interrupt while a message is waited for",
    "tests/distributed/test_lost_ranks_sweep.py": "a rank that is lost at any call of a process group",
    "tests/distributed/test_offload_strategies.py": "memory of sharded gradients, states that nobody asked for",
    "tests/distributed/test_parallel_model.py": "reducers that end, dtypes of sharded gradients, plans",
    "tests/distributed/test_sharded_training.py": "buckets in the wire's dtype, where gradients lie",
    "tests/distributed/test_step_in_backward.py": "late sums and joined buckets (internals)",
    "tests/torch/test_cuda_step.py": "copies and streams of a GPU that is none",
    "tests/torch/test_flat_states.py": "whether a step has to look at every state",
    "tests/torch/test_offload.py": "host memory: slabs, pinning, failures",
}
MOST_PRIVATE_NAMES = 31


def private_names(text: str) -> list[str]:
    """Returns the uses of private modules in the text of a test: imports and attributes, also in programs that the test
    has as strings."""
    packages = "|".join(PACKAGES)
    imports = r"^[ \t]*(?:from|import)[ \t]+(?:internals|torch_ext\.\w+)\b.*|\btorch_ext[ \t]+import[ \t]+.*\b(?:%s)\b"
    return re.findall(imports % packages + rf"|\btorch_ext\.(?:{packages})\.\w+", text, flags=re.MULTILINE)


def test_tests_depend_on_private_modules_where_they_must() -> None:
    tests = [
        p for p in sources("tests") if p.suffix == ".py" and "bench" not in p.parts and p != pathlib.Path(__file__)
    ]
    found = {str(p.relative_to(ROOT)): names for p in tests if (names := private_names(p.read_text()))}
    assert {path: private for path, private in found.items() if path not in PRIVATE_NAMES} == {}, "use public names"
    assert set(PRIVATE_NAMES) - set(found) == set(), "these depend on none any more: out of the table"
    assert len(PRIVATE_NAMES) <= MOST_PRIVATE_NAMES


@pytest.mark.parametrize(
    "text",
    [
        "from torch_ext.comm import wire",
        "    import torch_ext.native.ops",
        "x = torch_ext.parallel.parallelize._engine_of(model)",
        "import internals",
        "from internals import join_pairs",
        "from torch_ext import comm",
    ],
)
def test_private_names_are_seen(text: str) -> None:
    assert private_names(f"import torch\n{text}\n")


def test_public_names_are_not_taken_for_private_ones() -> None:
    assert not private_names(
        "import torch_ext\nfrom torch_ext import AdamW\ntorch_ext.AdamW(x)\ntorch.ops.torch_ext.cast_"
    )


_MAKERS = ("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand")
MAKERS = {*_MAKERS, "randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros"}


@pytest.mark.parametrize("module", python_modules())
def test_tensors_are_made_on_a_device_that_is_named(module: str) -> None:
    """Without device=, they would be created on the user's default device, a GPU after
    torch.set_default_device("cuda"). C would get addresses on a GPU, and host copies would not be on the host
    (tests/torch/test_default_device.py)."""
    nameless = [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(ast.parse(python_modules()[module].read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MAKERS
        if ast.unparse(node.func.value) == "torch"
        if not any(keyword.arg in ("device", None) for keyword in node.keywords)
    ]
    assert not nameless
