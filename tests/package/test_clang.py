"""Tests that clang compiles the C sources without a warning, as gcc does, and that its library steps with the same
bits."""

import ctypes
import itertools
import pathlib

import pytest
import torch
from clang_sources import CLANG, ISAS, ROOT, Source, clang, in_parallel, library_sources, starlark
from torch import Tensor

import torch_ext

pytestmark = pytest.mark.skipif(CLANG is None, reason="clang is not installed (tests/run.sh installs it)")


def test_what_needs_torch_or_nccl_and_the_examples_compile_without_a_warning() -> None:
    """Only the syntax is checked here. The other folders of csrc are compiled to a library by the fixture
    `libraries`."""
    sources = library_sources(["csrc/torch", "csrc/nccl", "examples/c"])
    in_parallel(lambda source: clang(*source.flags, "-fsyntax-only", source.path), sources)


def test_every_header_compiles_alone(tmp_path: pathlib.Path) -> None:
    """A header must not depend on what a source includes before it. CUDA headers are compiled after the emulated
    runtime, as nvcc includes the real one before any source."""
    c = [*starlark("bazel/copts.bzl")["C_OPTS"], "-Wno-unused-function", "-Wno-unused-const-variable", "-x", "c"]
    cuda, runtime = ["-std=c++20", "-w", "-Itests/cuda/emulated"], str(tmp_path / "cuda_runtime.pch")
    clang(*cuda, "-x", "c++-header", "tests/cuda/emulated/cuda_runtime.h", "-o", runtime)
    cuda += ["-include-pch", runtime, "-x", "c++"]
    avx512 = starlark("bazel/isa.bzl")["ISAS"]["x86_64"]["avx512"]
    headers = {str(path.relative_to(ROOT)) for folder in ("csrc", "cuda") for path in (ROOT / folder).rglob("*.h")}
    assert len(headers) > 70
    sources = [
        Source(path, cuda if path.startswith("cuda/") else [*c, *(avx512 if "avx512" in path else [])])
        for path in sorted(headers)
    ]
    in_parallel(lambda source: clang("-fsyntax-only", *source.flags, source.path), sources)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> list[ctypes.CDLL]:
    """Returns the library of the build, and one that clang builds from the same sources with little optimisation."""
    folder = tmp_path_factory.mktemp("clang")
    sources = library_sources(["csrc/core", "csrc/ops", "csrc/cpu"])

    def compile_source(source: Source) -> None:
        level = "-O1" if source.runs_here else "-O0"
        clang(*source.flags, level, "-c", source.path, "-o", f"{folder}/{source.name}.o")

    in_parallel(compile_source, sources)
    clang("-shared", "-o", f"{folder}/libtorch_ext.so", *(f"{folder}/{source.name}.o" for source in sources), "-lm")
    libraries = [ctypes.CDLL(path) for path in (torch_ext.library_path(), f"{folder}/libtorch_ext.so")]
    for library in libraries:
        library.tx_isa_name.restype = ctypes.c_char_p
    return libraries


# -- tx_adamw, from torch_ext.h -----------------------------------------------------------------------------------


class CTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("numel", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    ]


class CArgs(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_uint64),
        ("n", ctypes.c_int64),
        *((name, ctypes.POINTER(CTensor)) for name in ("params", "grads", "exp_avgs", "exp_avg_sqs")),
        *((name, ctypes.POINTER(CTensor)) for name in ("masters", "scales", "steps")),
        ("n_groups", ctypes.c_int64),
        ("groups", ctypes.POINTER(ctypes.c_double)),
        ("lrs", ctypes.c_void_p),
        ("meta", ctypes.c_void_p),
        *((name, CTensor) for name in ("grad_scale", "clip_coef", "found_inf", "skipped")),
        ("seed", ctypes.c_uint64),
        ("moment_rounding", ctypes.c_int32),
        ("weight_rounding", ctypes.c_int32),
        ("checksums", ctypes.c_void_p),
        ("resynced", CTensor),
        ("on_external_write", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("changed", "moved", "distances", "emas", "ema_lows", "healths")),
        ("ema_decay", ctypes.c_double),
        ("ema_every", ctypes.c_int64),
        ("notes", ctypes.c_void_p),
        ("notes_bytes", ctypes.c_int64),
    ]


CODES = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3, torch.uint8: 5, torch.int16: 7}
MASTERS = [
    (torch.float32, None),
    (torch.bfloat16, None),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.int16),
    (torch.float16, torch.float32),
]
MOMENTS = [torch.float32, torch.bfloat16, torch.float16, torch.uint8]
NUMEL = 2 * 1024 + 777  # whole tiles (1024) and blocks (128), and a part of each


def scaled(dtype: torch.dtype) -> bool:
    """Whether moments of this dtype have block scales."""
    return dtype in (torch.float16, torch.uint8)


def begin(param: torch.dtype, master: torch.dtype | None, grad: torch.dtype, moment: torch.dtype) -> list[Tensor]:
    """Returns a parameter with gradient and state, in the order of the struct's fields: params, grads ... steps."""
    weights = torch.randn(NUMEL, generator=torch.Generator().manual_seed(1)).to(param)
    blocks = 2 * -(-NUMEL // 128) if scaled(moment) else 0
    masters = torch.empty(0) if master is None else torch.zeros(NUMEL, dtype=master)
    if master == torch.float32:
        masters.copy_(weights)
    moments = [torch.zeros(NUMEL, dtype=moment) for _ in range(2)]
    gradients = torch.empty(NUMEL, dtype=grad)
    return [weights, gradients, *moments, masters, torch.zeros(blocks, dtype=torch.uint8), torch.zeros(1)]


def step(library: ctypes.CDLL, tensors: list[Tensor], decoupled: bool) -> None:
    """Makes one step by tx_adamw."""
    group = (ctypes.c_double * 7)(1e-2, 0.9, 0.999, 1e-8, 0.1, 0.0, float(decoupled))
    lists = [ctypes.pointer(CTensor(t.data_ptr(), t.numel(), CODES[t.dtype], 0)) for t in tensors]
    args = CArgs(ctypes.sizeof(CArgs), 1, *lists, 1, group, moment_rounding=1, weight_rounding=1)
    error = ctypes.create_string_buffer(1024)
    assert library.tx_adamw(ctypes.byref(args), None, error) == 0, error.value


def gradients(number: int) -> Tensor:
    """Returns normally distributed gradients, with one huge element, which the step limits, and one zero."""
    g = torch.randn(NUMEL, generator=torch.Generator().manual_seed(100 + number)) * 1e-2
    g[700 + number], g[5] = 1e30, 0.0
    return g


@pytest.mark.parametrize("isa", ISAS)
def test_a_library_made_by_clang_steps_with_the_same_bits(libraries: list[ctypes.CDLL], isa: str) -> None:
    present = list(itertools.takewhile(bool, (libraries[0].tx_isa_name(i) for i in range(10))))
    assert present == list(itertools.takewhile(bool, (libraries[1].tx_isa_name(i) for i in range(10))))
    compiled_well = {source.name for source in library_sources(["csrc/cpu"]) if source.runs_here}
    assert (f"kernels_isa-{isa}" in compiled_well) == (isa.encode() in present)
    if isa.encode() not in present:
        pytest.skip(f"this processor has no {isa}")
    for library in libraries:
        assert library.tx_isa_select(isa.encode(), None) == 0
    for (param, master), grad, moment, decoupled in itertools.product(
        MASTERS, [torch.float32, torch.bfloat16], MOMENTS, [True, False]
    ):
        states = [begin(param, master, grad, moment) for _ in libraries]
        for number in range(3):
            for library, tensors in zip(libraries, states, strict=True):
                tensors[1].copy_(gradients(number))
                step(library, tensors, decoupled)
        for ours, theirs in zip(*states, strict=True):
            equal = torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
            assert equal, (param, master, grad, moment, decoupled)
        assert torch.isfinite(states[0][0]).all() and states[0][6].item() == 3
    for library in libraries:
        assert library.tx_isa_select(None, None) == 0
