"""A GPU for machines without one: torch tensors that say they are on cuda:N, in host memory, and a CUDA library that
writes down how it was called and lets the CPU's functions do the work. What lies between, from torch's dispatcher to the
library's functions, is the real thing.

`pretend` changes the process for good (a libtorch_cuda.so, kernels for the CUDA key), so tests run it in one of their
own.
"""

import ctypes
import pathlib
import shutil
import subprocess
from typing import Any, NamedTuple

import pytest
import torch

from torch_ext import _library

ROOT = pathlib.Path(_library.__file__).parent.parent
STREAM = 0x5000  # the address of cuda:0's current stream; those of others follow

# The functions are the rows of entries.def, so that none is forgotten.
_CUDA_LIBRARY = r"""
#include <stdio.h>
#include <string.h>
#include "cuda/torch_ext_cuda.h"
static char calls[1 << 16];
static void note(const char *entry, const tx_cuda_call *call) {
  const size_t at = strlen(calls);
  snprintf(calls + at, sizeof calls - at, "%s %d %llu %llu %lld %d\n", entry, (int)call->device,
           (unsigned long long)(uintptr_t)call->stream, (unsigned long long)(uintptr_t)call->workspace,
           (long long)call->workspace_bytes, call->size == sizeof *call);
}
TX_API const char *stand_in_calls(void) { return calls; }
TX_API uint32_t tx_cuda_version(void) { return VERSION; }
TX_API int64_t tx_cuda_workspace(int64_t n) { return 24 * n; }
#define TX_LIST(...) __VA_ARGS__
#define TX_ENTRY(entry, parameters, arguments) \
  TX_API tx_status tx_cuda_##entry(TX_LIST parameters, const tx_cuda_call *call, tx_error *error) { \
    note(#entry, call); return tx_##entry(TX_LIST arguments, NULL, error); }
#define TX_ENTRY_ALONE(entry, parameters, arguments) \
  TX_API tx_status tx_cuda_##entry(TX_LIST parameters, const tx_cuda_call *call, tx_error *error) { \
    note(#entry, call); return tx_##entry(TX_LIST arguments, error); }
#include "csrc/torch/entries.def"
"""
_LIBTORCH_CUDA = """
#include <stdint.h>
int32_t aoti_torch_get_current_cuda_stream(int32_t device, void **stream) {
  *stream = (void *)(uintptr_t)(0x5000 + device);
  return 0;
}
"""


def compile_library(folder: pathlib.Path, name: str, source: str, *options: str) -> pathlib.Path:
    """A shared library of C. Skips the test where there is no compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to make a stand-in for a GPU with")
    (folder / f"{name}.c").write_text(source)
    path = folder / name
    command = [compiler, "-shared", "-fPIC", "-I", ROOT, "-I", ROOT / "csrc", f"-Wl,-soname,{name}", "-o", path]
    subprocess.run([*command, folder / f"{name}.c", *options], check=True)
    return path


def cuda_library(folder: pathlib.Path, version: str = "tx_version()") -> pathlib.Path:
    """version: what it says of itself, in C."""
    return compile_library(
        folder, "libtorch_ext_cuda.so", _CUDA_LIBRARY, f"-DVERSION=({version})", _library.library_path()
    )


def libtorch_cuda(folder: pathlib.Path) -> pathlib.Path:
    return compile_library(folder, "libtorch_cuda.so", _LIBTORCH_CUDA)


class _DLTensor(ctypes.Structure):
    """DLManagedTensor of dlpack.h, without its nesting."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("dim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


_CUDA = 2
_CODES = {  # dtype -> kind and bits
    torch.float32: (2, 32),
    torch.float64: (2, 64),
    torch.float16: (2, 16),
    torch.bfloat16: (4, 16),
    torch.int64: (0, 64),
    torch.int16: (0, 16),
    torch.uint8: (1, 8),
}
_kept: list[Any] = []  # what tensors on the stand-in read: nobody tells when they are gone


def as_cuda(host: torch.Tensor, index: int = 0) -> torch.Tensor:
    """A tensor on cuda:`index` in the memory of a contiguous CPU tensor."""
    shape = (ctypes.c_int64 * max(1, host.dim()))(*host.shape)
    strides = (ctypes.c_int64 * max(1, host.dim()))(*host.stride())
    managed = _DLTensor(
        host.data_ptr(), _CUDA, index, host.dim(), *_CODES[host.dtype], 1, shape, strides, 0, None, None
    )
    _kept.append((host, shape, strides, managed))
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    tensor: torch.Tensor = torch._C._from_dlpack(new(ctypes.addressof(managed), b"dltensor", None))
    return tensor


class Call(NamedTuple):
    entry: str
    device: int
    stream: int
    workspace: int  # address
    workspace_bytes: int


class StandIn:
    """The libraries at the given paths, loaded; from then on torch makes tensors on `cuda`."""

    def __init__(self, library: str, torch_library: str) -> None:
        self._torch_library = ctypes.CDLL(torch_library)
        self._library = ctypes.CDLL(library)
        self._library.stand_in_calls.restype = ctypes.c_char_p
        self._kernels = torch.library.Library("aten", "IMPL")
        self._kernels.impl("empty_strided", self._empty_strided, "CUDA")
        self.allocated: list[torch.Tensor] = []
        torch.cuda._lazy_init = lambda: None  # type: ignore[assignment]

    def _empty_strided(self, size: Any, _stride: Any, *, dtype: Any, device: Any, **_options: Any) -> torch.Tensor:
        self.allocated.append(torch.zeros(*size, dtype=dtype))
        return as_cuda(self.allocated[-1], device.index)

    def calls(self) -> list[Call]:
        """All so far. Every one brought the struct of its version."""
        calls = []
        for line in self._library.stand_in_calls().decode().splitlines():
            entry, *numbers, right_size = line.split()
            assert right_size == "1"
            calls.append(Call(entry, *map(int, numbers)))
        return calls
