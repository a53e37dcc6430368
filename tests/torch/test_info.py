"""python -m torch_ext info."""

import subprocess
import sys

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
    assert "CUDA" in facts
    assert run.stderr == ""


def test_unknown_command_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(["inf"])
    assert "info" in capsys.readouterr().err
