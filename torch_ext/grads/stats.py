"""Statistics of gradients (grad_stats_) as int64 words, which ranks may add, and the search for non-finite ones."""

from collections.abc import Sequence

import torch

from torch_ext.native import constants, ops
from torch_ext.tensors import dense

NONFINITE = constants.NORM_LIMBS  # the word behind the limbs of the norm counts non-finite elements
NOBODY = torch.iinfo(torch.int64).max  # first_bad where every element of every tensor is finite


def zeros(device: torch.device) -> torch.Tensor:
    return torch.zeros(constants.STATS_LEN, dtype=torch.int64, device=device)


def nobody(device: torch.device) -> torch.Tensor:
    return torch.full((1,), NOBODY, dtype=torch.int64, device=device)


def of(grads: Sequence[torch.Tensor], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The statistics, and the position of the first gradient with a non-finite element (int64 [1])."""
    stats, first_bad = zeros(device), nobody(device)
    ops.call("grad_stats_", list(grads), stats, first_bad)
    return stats, first_bad


ALL_FINITE = -1


class Watch:
    """Checks the gradients of one cycle, as they are ready, on their device; the host reads the outcome once."""

    def __init__(self) -> None:
        self._stats: torch.Tensor | None = None
        self._found: list[tuple[torch.Tensor, Sequence[int]]] = []

    def check(self, grads: Sequence[torch.Tensor], numbers: Sequence[int]) -> None:
        """On the current stream; always on one device. numbers: what `first` calls each gradient."""
        if not grads:
            return
        if self._stats is None:
            self._stats = zeros(grads[0].device)
        first = nobody(grads[0].device)
        ops.call("grad_stats_", [dense.contiguous(g.detach()) for g in grads], self._stats, first)
        self._found.append((first, numbers))

    def first(self) -> int:
        """The number of the first checked gradient with a non-finite element, or ALL_FINITE, and starts anew. Waits for
        the current stream, which must follow those of the checks."""
        found, self._found, self._stats = self._found, [], None
        if not found:
            return ALL_FINITE
        places = torch.cat([first for first, _ in found]).tolist()
        hits = (numbers[p] for p, (_, numbers) in zip(places, found, strict=True) if p != NOBODY)
        return next(hits, ALL_FINITE)


def first_nonfinite(grads: Sequence[torch.Tensor]) -> int:
    """The position of the first gradient with a non-finite element, or ALL_FINITE. Waits for the device."""
    watch = Watch()
    watch.check(grads, range(len(grads)))
    return watch.first()
