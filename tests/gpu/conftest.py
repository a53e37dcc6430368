"""Every test here needs a GPU, and says so where there is none."""

import pytest
import torch

NO_GPU = "this torch is built without CUDA" if not torch.backends.cuda.is_built() else "torch finds no GPU"


@pytest.fixture(autouse=True, scope="session")
def gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip(NO_GPU)
