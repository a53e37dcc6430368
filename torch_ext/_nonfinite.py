"""The check before communication (check_for_nan_in_grad): which gradient has a NaN or an Inf."""

from collections.abc import Sequence

import torch

from torch_ext import _stats, _tensors

ALL_FINITE = -1


def first_nonfinite(grads: Sequence[torch.Tensor]) -> int:
    """The position of the first gradient with a non-finite element, or ALL_FINITE."""
    if not grads:
        return ALL_FINITE
    stats, first = _stats.of([_tensors.contiguous(g.detach()) for g in grads], grads[0].device)
    return int(first) if stats[_stats.NONFINITE] else ALL_FINITE
