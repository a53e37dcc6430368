"""Every test here needs a GPU, and says so where there is none; those of the exchange also run on the device that
$TORCH_EXT_EXCHANGE_DEVICE names."""

import os

import pytest
import torch

NO_GPU = "this torch is built without CUDA" if not torch.backends.cuda.is_built() else "torch finds no GPU"


@pytest.fixture(autouse=True, scope="session")
def gpu() -> None:
    if not torch.cuda.is_available() and os.environ.get("TORCH_EXT_EXCHANGE_DEVICE") != "cpu":
        pytest.skip(NO_GPU)


@pytest.hookimpl(optionalhook=True)
def pytest_why_dead() -> str | None:
    """For journal.py. After an illegal access, say, every call of this process fails, and the first to say so may be
    one of a later test: so it is waited for here."""
    if torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            return str(error).partition("\n")[0]
    return None
