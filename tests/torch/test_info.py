"""The command `python -m torch_ext info`: what it says about torch, the library, CUDA and NCCL."""

import os
import pathlib
import subprocess
import sys

import gpu_stand_in
import pytest
import torch

import torch_ext
from torch_ext import __main__ as command


def test_info_says_what_was_found() -> None:
    run = subprocess.run([sys.executable, "-m", "torch_ext", "info"], capture_output=True, text=True, check=True)
    facts = {line.split("  ")[0]: line for line in run.stdout.splitlines()}
    assert torch.__version__ in facts["torch"]
    assert torch_ext.library_path() in facts["library"]
    assert "base" in facts["instruction sets"]
    assert "adamw_" in facts["operators"]
    assert "master_resync_" in facts["operators"]
    assert "get_num_threads" in facts["threads"]
    assert "CUDA library" in facts
    if not torch.backends.cuda.is_built():
        assert "built without CUDA" in facts["CUDA in torch"]
    if not torch.distributed.is_nccl_available():
        assert "built without NCCL" in facts["NCCL in torch"]
    assert run.stderr == ""


def facts_with(**variables: str) -> dict[str, str]:
    command = [sys.executable, "-m", "torch_ext", "info"]
    output = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | variables).stdout
    return {line.split("  ")[0]: line for line in output.splitlines()}


@pytest.mark.skipif(torch.distributed.is_nccl_available(), reason="torch brings an NCCL, which is taken")
def test_info_says_why_there_is_no_nccl() -> None:
    facts = facts_with(TORCH_EXT_NCCL="/nowhere/libnccl.so.2")
    assert "none: no NCCL was found (/nowhere/libnccl.so.2" in facts["NCCL"]
    assert "2.19 is needed" in facts["NCCL"]


def test_info_says_why_there_is_no_cuda_library() -> None:
    facts = facts_with(TORCH_EXT_CUDA_LIBRARY="/nowhere/lib.so")
    assert facts["CUDA library"].endswith("none: TORCH_EXT_CUDA_LIBRARY names /nowhere/lib.so, which cannot be read")
    assert "CUDA driver" not in facts


@pytest.mark.parametrize(
    "driver, devices, why_not, says",
    [
        (13010, 2, "", "runs CUDA 13.1; devices: 2"),
        (0, 0, "no driver", "none; the library runs on none of them: no driver"),
    ],
    ids=["two_devices", "no_driver"],
)
def test_info_says_what_the_cuda_library_is_for_and_what_runs_it(
    driver: int, devices: int, why_not: str, says: str, tmp_path: pathlib.Path
) -> None:
    about = f"""
TX_API tx_status tx_cuda_about_this(tx_cuda_about *about, tx_error *error) {{
  (void)error;
  if (about->size != sizeof *about) return TX_ERROR_INVALID_ARGUMENT;
  about->runtime_version = 13000, about->driver_version = {driver}, about->n_devices = {devices};
  strcpy(about->architectures, "sm_80 sm_90");
  strcpy(about->why_not, "{why_not}");
  return TX_OK;
}}
"""
    library = gpu_stand_in.cuda_library(tmp_path, more=about)
    facts = facts_with(TORCH_EXT_CUDA_LIBRARY=str(library))
    assert facts["CUDA library"].endswith(f"{library}: built with CUDA 13.0 for sm_80 sm_90")
    assert facts["CUDA driver"].endswith(says)


def test_unknown_command_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(["inf"])
    assert "info" in capsys.readouterr().err
