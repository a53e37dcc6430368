"""Tests libtorch_ext_delta.so by itself: it encodes and applies a delta in a process without torch."""

import pathlib
import subprocess
import sys

import pytest

import torch_ext

LIBRARY = pathlib.Path(torch_ext.library_path()).with_name("libtorch_ext_delta.so")

PROGRAM = """
import ctypes, sys
from ctypes import POINTER, Structure, byref, c_char_p, c_int32, c_int64, c_uint64, c_void_p, cast
lib = ctypes.CDLL(sys.argv[1])
U8, BF16, N = 5, 3, 20000

class Tensor(Structure):
    _fields_ = [("data", c_void_p), ("numel", c_int64), ("dtype", c_int32), ("reserved", c_int32)]

class Param(Structure):
    _fields_ = [("name", c_char_p), ("numel", c_int64), ("dtype", c_int32), ("reserved", c_int32)]

class Chain(Structure):
    _fields_ = [("size", c_uint64), ("id", c_uint64 * 2), ("version", c_int64), ("link", c_uint64),
                ("model", c_uint64), ("part", c_int32), ("parts", c_int32)]

class Run(Structure):
    _fields_ = [("param", c_int64), ("offset", c_int64)] + [
        (name, Tensor) for name in ("weights", "changed", "moved", "distances", "checksums")]

class Args(Structure):
    _fields_ = [("size", c_uint64), ("n_params", c_int64), ("params", POINTER(Param)), ("n_runs", c_int64),
                ("runs", POINTER(Run)), ("steps", c_int64), ("kind", c_int32), ("sliceable", c_int32)]

class Message(Structure):
    _fields_ = [("data", c_void_p), ("bytes", c_int64), ("reserved", c_void_p)]

class Piece(Structure):
    _fields_ = [("param", c_int64), ("first", c_int64), ("rows", c_int64), ("columns", c_int64), ("step", c_int64),
                ("data", c_void_p), ("row_stride", c_int64), ("column_stride", c_int64)]

def tensor(buffer, numel, dtype):
    return Tensor(cast(buffer, c_void_p), numel, dtype, 0)

def call(name, *args):
    error = ctypes.create_string_buffer(1024)
    assert getattr(lib, name)(*args, error) == 0, error.value

params = (Param * 1)(Param(b"w", N, BF16, 0))
theirs, ours = (ctypes.c_uint16 * N)(*[0x3c00] * N), (ctypes.c_uint16 * N)(*[0x3c00] * N)
chain = Chain(size=ctypes.sizeof(Chain))
call("tx_delta_chain_begin", c_int64(1), params, (c_uint64 * 2)(1, 2), 0, 1, byref(chain))
receiver = c_void_p()
piece = Piece(0, 0, 1, N, 0, cast(ours, c_void_p), 0, 1)
call("tx_delta_open", c_int64(1), params, c_int64(1), byref(piece), byref(receiver))
changed, moved = (ctypes.c_uint8 * (N // 8))(), (ctypes.c_uint16 * 157)(*[0x3a80] * 157)
for i in range(0, N, 70):
    theirs[i] += 1
    changed[i // 8] |= 1 << i % 8
run = Run(0, 0, tensor(theirs, N, BF16), tensor(changed, N // 8, U8), tensor(moved, 157, BF16))
args = Args(ctypes.sizeof(Args), 1, params, 1, ctypes.pointer(run), 1, 0, 0)
message = Message()
call("tx_delta_encode", byref(args), byref(chain), None, byref(message))
assert message.bytes < N // 8
delta = Tensor(message.data, message.bytes, U8, 0)
call("tx_delta_apply", receiver, c_int64(1), byref(delta), 0, None)
assert list(ours) == list(theirs)
lib.tx_delta_free(byref(message))
lib.tx_delta_close(receiver)
assert "torch" not in sys.modules and "libtorch" not in open("/proc/self/maps").read().replace("libtorch_ext_delta", "")
print("applied")
"""


def test_it_applies_without_torch() -> None:
    if not LIBRARY.exists():
        pytest.skip(f"{LIBRARY.name} is not built")
    command = [sys.executable, "-I", "-c", PROGRAM, str(LIBRARY)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "applied\n", done.stderr


def test_it_is_small() -> None:
    """The library has no code of optimizer steps, which is most of libtorch_ext.so."""
    if not LIBRARY.exists():
        pytest.skip(f"{LIBRARY.name} is not built")
    assert LIBRARY.stat().st_size < 900_000
