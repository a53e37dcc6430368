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
