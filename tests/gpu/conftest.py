"""Skips every test here without a GPU, and says why. With $TORCH_EXT_GPU_TESTS_DEVICE=cpu they run on the CPU: not all
pass there (test_gpu_bodies.py, test_gpu_exchange_bodies.py)."""

import os

import pytest
import torch

NO_GPU = "this torch is built without CUDA" if not torch.backends.cuda.is_built() else "torch finds no GPU"


@pytest.fixture(autouse=True, scope="session")
def gpu() -> None:
    if not torch.cuda.is_available() and os.environ.get("TORCH_EXT_GPU_TESTS_DEVICE") != "cpu":
        pytest.skip(NO_GPU)


@pytest.hookimpl(optionalhook=True)
def pytest_why_dead() -> str | None:
    """Returns journal.py's reason to end the process.

    After an illegal access, for example, every CUDA call of this process fails. The first call that reports it may be
    in a later test, so this waits for the device after each test.
    """
    if torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            return str(error).partition("\n")[0]
    return None
