"""Runs the operator tests again under another interpreter with another torch: one library binary must serve both.

TX_OTHER_PYTHON names the interpreter; it needs torch >= 2.10 and pytest.
"""

import os
import pathlib
import subprocess

import pytest

HERE = pathlib.Path(os.path.realpath(__file__)).parent  # the source folder, where the other test files are
FILES = (
    "test_operators.py",
    "test_operators_in_torch.py",
    "test_argument_errors.py",
    "test_opcheck.py",
    "test_leak.py",
    "test_abi.py",
    "test_compile.py",
    "test_load_library.py",
)


@pytest.mark.parametrize("file", FILES)
def test_other_python(file: str) -> None:
    python = os.environ.get("TX_OTHER_PYTHON")
    if not python:
        pytest.skip("TX_OTHER_PYTHON names no interpreter with another torch")
    environment = {k: v for k, v in os.environ.items() if k not in ("TX_OTHER_PYTHON", "XML_OUTPUT_FILE")}
    result = subprocess.run(
        [python, HERE.parent / "pytest_main.py", "-q", HERE / file], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
