"""grad_stats_ and its kin: the statistics of gradients as int64 words, which ranks may add."""

from collections.abc import Sequence

import torch

from torch_ext import _header, _ops

NONFINITE = _header.NORM_LIMBS  # the word behind the limbs of the norm counts non-finite elements
NOBODY = torch.iinfo(torch.int64).max  # first_bad where every element of every tensor is finite


def zeros(device: torch.device) -> torch.Tensor:
    return torch.zeros(_header.STATS_LEN, dtype=torch.int64, device=device)


def nobody(device: torch.device) -> torch.Tensor:
    return torch.full((1,), NOBODY, dtype=torch.int64, device=device)


def of(grads: Sequence[torch.Tensor], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The statistics, and the position of the first gradient with a non-finite element (int64 [1])."""
    stats, first_bad = zeros(device), nobody(device)
    _ops.call("grad_stats_", list(grads), stats, first_bad)
    return stats, first_bad
