"""How the library finds torch: every order of loading works, operators are registered once, and errors say what is
missing."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence

import pytest

import torch_ext

ROOT = pathlib.Path(torch_ext.__file__).parent.parent
CALL = "import torch; x = torch.zeros(3); torch.ops.torch_ext.bucket_accumulate_([x], [x + 1]); assert x.sum() == 3\n"
REGISTER = """
import ctypes
class Error(ctypes.Structure):
    _fields_ = [("message", ctypes.c_char * 1024)]
def register(library):
    error = Error()
    return library.tx_torch_register(ctypes.byref(error)), error.message.decode()
"""


def run(code: str, *arguments: str) -> str:
    """Runs the code in a process of its own, without torch_ext unless the code imports it; returns what it prints."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], check=True, capture_output=True, text=True, timeout=300
    ).stdout.strip()


LOAD = f"import torch; torch.ops.load_library({torch_ext.library_path()!r})\n"
PACKAGE = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import torch_ext\n"


def test_load_library_alone_registers_and_the_package_may_follow() -> None:
    run(LOAD + CALL + PACKAGE + CALL)


@pytest.mark.parametrize(
    "grads, says",
    [
        ("torch.ones(3)", "grads[0] is on cpu and main_grads[0] on meta; all tensors of a call must be on one device"),
        ("torch.ones(3, device='meta')", "main_grads[0] is a meta tensor, which holds no data"),
    ],
    ids=["devices_that_differ", "meta"],
)
def test_the_kernels_name_devices_without_the_package_too(grads: str, says: str) -> None:
    code = f"""
try:
    torch.ops.torch_ext.bucket_accumulate_([torch.zeros(3, device="meta")], [{grads}])
except RuntimeError as refusal:
    print(refusal)
"""
    assert says in run(LOAD + code)


def test_load_library_after_the_package_does_nothing_more() -> None:
    run(PACKAGE + "import torch; torch.ops.load_library(torch_ext.library_path())\n" + LOAD + CALL)


def test_without_torch_the_library_loads_and_says_what_is_missing() -> None:
    message = run(REGISTER + "import sys; print(*register(ctypes.CDLL(sys.argv[1])))", torch_ext.library_path())
    assert message.startswith("301 ") and "import torch first" in message


@pytest.mark.parametrize("call", ["tx_torch_parallel(None", "tx_torch_cuda_library(None, ctypes.c_int64(9)"])
def test_nowhere_to_write_is_refused(call: str) -> None:
    """Output arguments that are NULL."""
    code = f"""
import sys, torch
library, error = ctypes.CDLL(sys.argv[1]), Error()
print(library.{call}, ctypes.byref(error)), error.message.decode())
"""
    message = run(REGISTER + code, torch_ext.library_path())
    assert message.startswith("100 ") and "is NULL" in message


def test_torch_imported_after_the_library() -> None:
    code = "library = ctypes.CDLL(sys.argv[1]); assert register(library)[0] == 301\n"
    code += "import torch; assert register(library) == (0, ''); assert register(library) == (0, '')\n"
    run("import sys\n" + REGISTER + code + CALL, torch_ext.library_path())


def test_many_threads_register_once() -> None:
    code = """
import sys, concurrent.futures
library = ctypes.CDLL(sys.argv[1])
import torch
with concurrent.futures.ThreadPoolExecutor(8) as pool:
    assert list(pool.map(lambda _: register(library), range(64))) == [(0, "")] * 64
"""
    run(REGISTER + code + CALL, torch_ext.library_path())


def test_a_second_copy_of_the_library_is_refused_and_the_first_still_works(tmp_path: pathlib.Path) -> None:
    copy = shutil.copy(torch_ext.library_path(), tmp_path)
    code = """
import sys, torch
torch.ops.load_library(sys.argv[1])
status, message = register(ctypes.CDLL(sys.argv[2]))
print(status, message)
"""
    message = run(REGISTER + code + CALL, torch_ext.library_path(), str(copy))
    assert message.startswith("301 ") and "another copy of this library" in message


def test_a_library_that_is_closed_again_stays_for_torch() -> None:
    """dlclose does not unload the library: torch has pointers to its kernels."""
    code = """
import ctypes, sys, torch, _ctypes
_ctypes.dlclose(ctypes.CDLL(sys.argv[1])._handle)
"""
    run(code + CALL, torch_ext.library_path())


def test_a_registration_that_failed_half_way_leaves_nothing_behind() -> None:
    code = """
import sys, torch
theirs = torch.library.Library("torch_ext", "FRAGMENT")
theirs.define("cast_(Tensor x) -> ()")
library = ctypes.CDLL(sys.argv[1])
status, message = register(library)
assert status == 301 and "cast_" in message, message
assert not hasattr(torch.ops.torch_ext, "adamw_")
theirs._destroy()
assert register(library) == (0, "")
"""
    run(REGISTER + code + CALL, torch_ext.library_path())


def fake_torch(folder: pathlib.Path, source: str) -> str:
    """Compiles a libtorch_cpu.so that exports only what `source` defines; returns its path."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to make an old torch with")
    (folder / "old.c").write_text("#include <stdint.h>\n" + source)
    path = folder / "libtorch_cpu.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-Wl,-soname,libtorch_cpu.so", "-o", path, folder / "old.c"], check=True
    )
    return str(path)


@pytest.mark.parametrize(
    "source, says",
    [
        (
            "uint64_t aoti_torch_abi_version(void) { return 2ull << 56 | 9ull << 48 | 1ull << 40; }",
            ["torch 2.9.1", "has no symbol", "torch >= 2.10 is needed"],
        ),
        ("int nothing;", ["has no symbol aoti_torch_abi_version", "torch >= 2.10 is needed"]),
    ],
    ids=["2.9", "older_than_the_version_symbol"],
)
def test_a_torch_that_is_too_old_is_named(tmp_path: pathlib.Path, source: str, says: Sequence[str]) -> None:
    code = "import sys; old = ctypes.CDLL(sys.argv[2]); print(*register(ctypes.CDLL(sys.argv[1])))"
    message = run(REGISTER + code, torch_ext.library_path(), fake_torch(tmp_path, source))
    assert message.startswith("301 ") and all(words in message for words in says), message


def installed(folder: pathlib.Path) -> str:
    """Copies the package, without the library, to `folder`; returns code that imports the copy."""
    without = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(pathlib.Path(torch_ext.__file__).parent, folder / "torch_ext", ignore=without)
    return f"import sys; sys.path.insert(0, {str(folder)!r}); import torch_ext\n"


@pytest.mark.parametrize("place", ["torch_ext", ".", "bazel-bin"], ids=["package", "runfiles", "bazel-bin"])
def test_the_library_is_found_in_each_place(tmp_path: pathlib.Path, place: str) -> None:
    package = installed(tmp_path)
    (tmp_path / place).mkdir(exist_ok=True)
    expected = shutil.copy(torch_ext.library_path(), tmp_path / place)
    assert os.path.samefile(run(package + CALL + "print(torch_ext.library_path())"), expected)


def test_a_library_that_was_not_built_is_an_import_error_that_says_how(tmp_path: pathlib.Path) -> None:
    code = installed(tmp_path)
    says = run(f"try:\n    {code}except ImportError as refusal:\n    print(refusal)\n")
    assert re.match("libtorch_ext.so is in none of .*bazel build //:torch_ext", says)


def test_the_library_links_to_no_torch_and_no_python() -> None:
    readelf = shutil.which("readelf")
    if readelf is None:
        pytest.skip("no readelf to look at the library with")
    dynamic = subprocess.run(
        [readelf, "-d", torch_ext.library_path()], check=True, capture_output=True, text=True
    ).stdout
    needed = [line.split("[")[1].rstrip("]") for line in dynamic.splitlines() if "(NEEDED)" in line]
    assert needed and all(
        name.startswith(("libc.", "libm.", "libdl.", "libpthread.", "ld-linux", "libgcc_s")) for name in needed
    )
