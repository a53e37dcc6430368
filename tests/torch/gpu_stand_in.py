"""A stand-in for a GPU, for machines without one. Torch tensors that say they are on cuda:N live in host memory, and a
stand-in CUDA library records how it was called and lets the CPU functions do the work. Everything in between, from
torch's dispatcher to the library's functions, is the real code.

Using it changes the process for good (a libtorch_cuda.so is loaded, kernels are registered for the CUDA key), so each
test runs it in a process of its own: see `seen_beside`.
"""

import ctypes
import functools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import warnings
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._pytree import tree_map

import torch_ext

ROOT = pathlib.Path(torch_ext.__file__).parent.parent
STREAM = 0x5000  # handle of cuda:0's current stream; that of cuda:N is STREAM + N

# entries.def lists every function of the CUDA library, so the stand-in cannot miss one.
_CUDA_LIBRARY = r"""
#include <stdio.h>
#include <string.h>
#include "csrc/torch_ext_cuda.h"
static char calls[1 << 16];
static int (*guards_now)(void);
TX_API void stand_in_tell_guards(int (*now)(void)) { guards_now = now; }
static void note(const char *entry, const tx_cuda_call *call) {
  const size_t at = strlen(calls);
  snprintf(calls + at, sizeof calls - at, "%s %d %llu %llu %lld %d %d\n", entry, (int)call->device,
           (unsigned long long)(uintptr_t)call->stream, (unsigned long long)(uintptr_t)call->workspace,
           (long long)call->workspace_bytes, guards_now ? guards_now() : -1, call->size == sizeof *call);
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
/* The calling thread's part in captures. */
static __thread int32_t capture_mode;
TX_API int stand_in_capture_mode(void) { return capture_mode; }
TX_API tx_status tx_cuda_exchange_capture_mode(int32_t *mode, tx_error *error) {
  const int32_t before = capture_mode;
  (void)error;
  capture_mode = *mode;
  *mode = before;
  return TX_OK;
}
/* Lanes that copy at once and count. */
static long long copies[2], marks[2], lanes_there;
TX_API long long stand_in_copies(int up) { return copies[up]; }
TX_API long long stand_in_marks(int up) { return marks[up]; }
TX_API long long stand_in_lanes(void) { return lanes_there; }
static tx_status copy(void *ctx, int32_t up, void *to, const void *from, int64_t bytes, tx_error *error) {
  (void)ctx, (void)error;
  __atomic_fetch_add(&copies[up], 1, __ATOMIC_RELAXED);
  memcpy(to, from, bytes);
  return TX_OK;
}
static tx_status mark(void *ctx, int32_t up, int64_t slot, tx_error *error) {
  (void)ctx, (void)slot, (void)error;
  __atomic_fetch_add(&marks[up], 1, __ATOMIC_RELAXED);
  return TX_OK;
}
static tx_status wait(void *ctx, int32_t up, int64_t slot, tx_error *error) {
  (void)ctx, (void)up, (void)slot, (void)error;
  return TX_OK;
}
static tx_status follow(void *ctx, int64_t slot, tx_error *error) {
  (void)ctx, (void)slot, (void)error;
  return TX_OK;
}
TX_API tx_status tx_cuda_copies_make(int32_t device, void *down, void *up, int64_t slots, tx_copy_ops *lanes,
                                    tx_error *error) {
  if (device != 1 || down != (void *)0x7000 || up != (void *)0x7001 || slots < 1) {
    snprintf(error->message, sizeof error->message, "lanes of %d, %p, %p, %lld", device, down, up, (long long)slots);
    return TX_ERROR_ILLEGAL_VALUE;
  }
  lanes_there++;
  *lanes = (tx_copy_ops){sizeof *lanes, copies, copy, mark, wait, follow};
  return TX_OK;
}
TX_API void tx_cuda_copies_free(tx_copy_ops *lanes) { lanes_there -= lanes->ctx != NULL; }
"""
_LIBTORCH_CUDA = """
#include <stdint.h>
int32_t aoti_torch_get_current_cuda_stream(int32_t device, void **stream) {
  *stream = (void *)(uintptr_t)(0x5000 + device);
  return 0;
}
/* Guards of a device: how many are there, and of which they were so far (as bits). */
static int guards_there, guarded;
int stand_in_guards(void) { return guards_there; }
int stand_in_guarded(void) { return guarded; }
int32_t aoti_torch_create_cuda_guard(int32_t device, void **guard) {
  guards_there++;
  guarded |= 1 << device;
  *guard = &guards_there;
  return 0;
}
int32_t aoti_torch_delete_cuda_guard(void *guard) {
  guards_there -= guard == &guards_there;
  return 0;
}
"""


def compile_library(folder: pathlib.Path, name: str, source: str, *options: str) -> pathlib.Path:
    """Compiles a shared library from C source and returns its path. Skips the test if there is no compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to make a stand-in for a GPU with")
    (folder / f"{name}.c").write_text(source)
    path = folder / name
    command = [compiler, "-shared", "-fPIC", "-I", ROOT, "-I", ROOT / "csrc", f"-Wl,-soname,{name}", "-o", path]
    subprocess.run([*command, folder / f"{name}.c", *options], check=True)
    return path


def cuda_library(folder: pathlib.Path, version: str = "tx_version()", more: str = "") -> pathlib.Path:
    """Compiles the stand-in for libtorch_ext_cuda.so and returns its path. version: the version that it reports, a C
    expression. more: C source of functions to add to the operators."""
    return compile_library(
        folder, "libtorch_ext_cuda.so", _CUDA_LIBRARY + more, f"-DVERSION=({version})", torch_ext.library_path()
    )


def libtorch_cuda(folder: pathlib.Path) -> pathlib.Path:
    """Compiles a stand-in for torch's libtorch_cuda.so (current stream, device guards) and returns its path. Skips the
    test under a torch that is built for CUDA, whose own library would be called instead."""
    if torch.version.cuda is not None:
        pytest.skip("this torch is built for CUDA, and its own libtorch_cuda.so would be asked; one for CPUs is needed")
    return compile_library(folder, "libtorch_cuda.so", _LIBTORCH_CUDA)


# c10 makes a tensor's device current around many operators, so the CUDA device type needs a guard.
_GUARDS = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace {
struct Guards final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::DeviceIndex deviceCount() const noexcept override { return 2; }
};
}
C10_REGISTER_GUARD_IMPL(CUDA, Guards)
"""


def device_guards(folder: pathlib.Path) -> pathlib.Path:
    """Compiles device guards that do nothing, for a torch without guards for CUDA, and returns the library's path.
    Skips the test if they cannot be compiled, or if this torch has guards of its own."""
    compiler, torch_folder = shutil.which("g++"), pathlib.Path(torch.__file__).parent
    if compiler is None or torch.backends.cuda.is_built():
        pytest.skip("no C++ compiler, or a torch that has its own device guards")
    path = folder / "libguards.so"
    (folder / "guards.cc").write_text(_GUARDS)
    options = ["-std=c++20", "-shared", "-fPIC", "-I", torch_folder / "include", "-L", torch_folder / "lib", "-lc10"]
    subprocess.run([compiler, "-o", path, folder / "guards.cc", *options], check=True)
    return path


class _DLTensor(ctypes.Structure):
    """DLManagedTensor of dlpack.h, with the nested struct's fields inlined."""

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


_CPU, _CUDA = 1, 2
_CODES = {  # dtype -> DLPack's type code and bits
    torch.float32: (2, 32),
    torch.float64: (2, 64),
    torch.float16: (2, 16),
    torch.bfloat16: (4, 16),
    torch.int64: (0, 64),
    torch.int32: (0, 32),
    torch.int16: (0, 16),
    torch.bool: (6, 8),
    torch.uint8: (1, 8),
}
_kept: list[Any] = []  # memory of the stand-in's tensors; it is kept for good, as nothing says when one is freed


def as_cuda(host: torch.Tensor, index: int = 0) -> torch.Tensor:
    """Returns a tensor on cuda:`index` that shares the memory of a CPU tensor."""
    return _on(_CUDA, index, host)


def _on(device_type: int, index: int, t: torch.Tensor) -> torch.Tensor:
    """Returns a tensor on the given device that shares the memory of `t`, by way of DLPack."""
    shape = (ctypes.c_int64 * max(1, t.dim()))(*t.shape)
    strides = (ctypes.c_int64 * max(1, t.dim()))(*t.stride())
    managed = _DLTensor(t.data_ptr(), device_type, index, t.dim(), *_CODES[t.dtype], 1, shape, strides, 0, None, None)
    _kept.append((t, shape, strides, managed))
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    tensor: torch.Tensor = torch._C._from_dlpack(new(ctypes.addressof(managed), b"dltensor", None))
    return tensor


def without_pinned_memory() -> list[Any]:
    """Makes torch.empty ignore pin_memory in this process from now on: a torch for the CPU has no pinned memory.
    Returns a list to which the size of each such request is appended."""
    asked: list[Any] = []
    made = torch.empty

    def empty(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory:
            asked.append(size)
        return made(*size, **options)

    torch.empty = empty  # type: ignore[assignment]
    return asked


def seen_beside(folder: pathlib.Path, code: str) -> dict[str, Any]:
    """Runs the code in a process of its own and returns the JSON that it prints. The code's arguments are those of
    `StandIn`; the libraries are compiled into the folder."""
    library = cuda_library(folder)
    arguments = [library, libtorch_cuda(folder), device_guards(folder)]
    environment = dict(os.environ) | {"TORCH_EXT_CUDA_LIBRARY": str(library)}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert result.returncode == 0, result.stderr
    seen: dict[str, Any] = json.loads(result.stdout)
    return seen


class Call(NamedTuple):
    """One call that the stand-in library got."""

    entry: str
    device: int
    stream: int
    workspace: int  # address
    workspace_bytes: int
    guards: int  # how many of torch's device guards are active around the call


def as_host(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a CPU tensor that shares the memory of a tensor on the stand-in."""
    return _on(_CPU, 0, tensor)


class StandIn:
    """Loads the libraries at the given paths; from then on torch can create tensors on `cuda`.

    guards: the library of `device_guards`. With it every operator of torch runs on `cuda` (except autograd's backward),
    and `waits` lists the operators that made the host wait for the device.
    """

    def __init__(self, library: str, torch_library: str, guards: str | None = None) -> None:
        self._torch_library = ctypes.CDLL(torch_library)
        self._library = ctypes.CDLL(library)
        self._library.stand_in_calls.restype = ctypes.c_char_p
        self._library.stand_in_tell_guards(self._torch_library.stand_in_guards)
        self._kernels = torch.library.Library("aten", "IMPL")
        self.allocated: list[torch.Tensor] = []
        self.waits: list[str] = []
        torch.cuda._lazy_init = lambda: None  # type: ignore[assignment]
        torch.cuda.is_current_stream_capturing = lambda: False  # a torch for the CPU has no such function
        if guards is None:
            self._kernels.impl("empty_strided", self._empty_strided, "CUDA")
        else:
            self._guards = ctypes.CDLL(guards)
            self._register_everything()

    def _empty_strided(self, size: Any, _stride: Any, *, dtype: Any, device: Any, **_options: Any) -> torch.Tensor:
        self.allocated.append(torch.zeros(*size, dtype=dtype))
        return as_cuda(self.allocated[-1], device.index)

    def _register_everything(self) -> None:
        """Lets CPU kernels serve the CUDA key, for operators that have no kernel for it and instead of kernels that all
        devices share: the latter would look for a real GPU further down."""
        self._fallback = torch.library.Library("_", "IMPL")
        self._fallback.fallback(self._on_the_cpu, "CUDA")
        # Not registered: these are composed of other operators, or return views.
        kept = {"aten::detach", "aten::alias", "aten::_to_copy", "aten::lift_fresh"}
        shared = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about each kernel that is replaced
            for name in torch._C._dispatch_get_all_op_names():
                if not name.startswith("aten::") or name in kept or has(name, "CompositeImplicitAutograd"):
                    continue
                if any(has(name, key) for key in shared):
                    base, _, overload = name.removeprefix("aten::").partition(".")
                    op = getattr(getattr(torch.ops.aten, base), overload or "default")
                    self._kernels.impl(name.removeprefix("aten::"), functools.partial(self._on_the_cpu, op), "CUDA")

    def _on_the_cpu(self, op: Any, *args: Any, **options: Any) -> Any:
        """Runs `op` on CPU tensors that share the arguments' memory, and returns its results as tensors on the
        stand-in. Records in `waits` the operators that would wait for a GPU."""
        device: torch.device | None = None  # the device that results are on
        twins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        kinds = set()

        def down(a: Any) -> Any:
            """Returns a CPU tensor for one on the stand-in, and the CPU for its device."""
            nonlocal device
            if isinstance(a, torch.device):
                device = a
                return torch.device("cpu")
            if isinstance(a, torch.Tensor):
                kinds.add(a.device.type)
                if a.device.type == "cuda":
                    device = a.device if device is None else device
                    twin = as_host(a)
                    twins[id(twin)] = twin, a
                    return twin
            return a

        def up(result: Any) -> Any:
            """Returns the stand-in's tensor for a result: the argument itself if the operator returned it."""
            if not isinstance(result, torch.Tensor) or (device is not None and device.type == "cpu"):
                return result
            if id(result) in twins:
                return twins[id(result)][1]
            return as_cuda(result, (device.index or 0) if device is not None else 0)

        given, named = tree_map(down, (args, options))
        copies = op is torch.ops.aten.copy_.default and len(kinds) == 2
        if copies and device is not None and args[0].device.type == "cpu":
            device = torch.device("cpu")
        if op is torch.ops.aten._local_scalar_dense.default or (copies and not (*args[2:], False)[0]):
            self.waits.append(f"{op}")
        with torch.no_grad():
            result = op(*given, **named)
        return args[0] if copies else tree_map(up, result)

    def lanes(self) -> dict[str, list[int]]:
        """Returns the number of copies and of marks so far, each as [down, up], and how many lanes there are."""
        way = {name: [getattr(self._library, f"stand_in_{name}")(up) for up in (0, 1)] for name in ("copies", "marks")}
        return way | {"lanes": [self._library.stand_in_lanes()]}

    def capture_mode(self) -> int:
        """Returns the calling thread's cudaStreamCaptureMode, 0 at first."""
        return int(self._library.stand_in_capture_mode())

    def guards(self) -> tuple[int, int]:
        """Returns how many of torch's device guards are active, and a bit mask of the devices that were guarded so
        far."""
        return self._torch_library.stand_in_guards(), self._torch_library.stand_in_guarded()

    def calls(self) -> list[Call]:
        """Returns all calls so far, and asserts that each passed a tx_cuda_call of the size that the library
        expects."""
        calls = []
        for line in self._library.stand_in_calls().decode().splitlines():
            entry, *numbers, right_size = line.split()
            assert right_size == "1"
            calls.append(Call(entry, *map(int, numbers)))
        return calls
