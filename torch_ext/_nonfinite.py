"""The check before communication (check_for_nan_in_grad): which gradient has a NaN or an Inf."""

from collections.abc import Sequence

import torch

from torch_ext import _ops

ALL_FINITE = -1

_COUNT = 20  # the word of grad_stats_ that counts, behind the limbs of the norm (TX_NORM_LIMBS)


def first_nonfinite(grads: Sequence[torch.Tensor]) -> int:
    """The position of the first gradient with a non-finite element, or ALL_FINITE."""
    stats = torch.zeros(_COUNT + 1, dtype=torch.int64, device=grads[0].device)
    first = torch.full((1,), torch.iinfo(torch.int64).max, device=grads[0].device)
    _ops.call("grad_stats_", list(grads), stats, first)
    return int(first) if stats[_COUNT] else ALL_FINITE
