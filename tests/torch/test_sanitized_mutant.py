"""Checks the address sanitizer: it must find a bug that is put into the library, a write past the end of a tensor."""

import os
import pathlib
import subprocess
import sys

import pytest
import sanitized_main

MUTANT = pathlib.Path(__file__).parent / "libtorch_ext_mutant.so"

CODE = """
import sys, torch
torch.ops.load_library(sys.argv[1])
target, n, none = torch.zeros(1001), [], torch.empty(0)
torch.ops.torch_ext.cast_([torch.ones(2048, dtype=torch.bfloat16)[:1001]], [target], n, n, none)
print(target.sum().item())
"""


@pytest.mark.skipif(
    sanitized_main.PRELOADED not in os.environ, reason="bazel test --config=asan //tests/torch:sanitized"
)
def test_a_write_behind_a_tensor_is_found() -> None:
    import torch_ext

    def run(path: object) -> "subprocess.CompletedProcess[str]":
        return subprocess.run([sys.executable, "-c", CODE, str(path)], capture_output=True, text=True)

    assert run(torch_ext.library_path()).stdout == "1001.0\n"
    found = run(MUTANT)
    assert found.returncode != 0 and "AddressSanitizer: heap-buffer-overflow" in found.stderr, found.stderr
    assert "WRITE of size" in found.stderr and "cast" in found.stderr
