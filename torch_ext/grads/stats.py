"""Statistics of gradients (grad_stats_) as int64 words that can be summed over ranks, and the search for non-finite
gradients."""

from collections.abc import Sequence

import torch

from torch_ext.native import constants, ops
from torch_ext.tensors import dense

NONFINITE = constants.NORM_LIMBS  # index of the word after the norm's limbs: the number of non-finite elements
NO_POSITION = torch.iinfo(torch.int64).max  # first_bad if every element of every tensor is finite


def zeros(device: torch.device) -> torch.Tensor:
    return torch.zeros(constants.STATS_LEN, dtype=torch.int64, device=device)


def no_position(device: torch.device) -> torch.Tensor:
    return torch.full((1,), NO_POSITION, dtype=torch.int64, device=device)


def of(grads: Sequence[torch.Tensor], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the statistics, and the position of the first gradient with a non-finite element (int64 [1])."""
    stats, first_bad = zeros(device), no_position(device)
    ops.call("grad_stats_", list(grads), stats, first_bad)
    return stats, first_bad


def of_plain(grads: Sequence[torch.Tensor], device: torch.device) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Returns what `of` returns, if each gradient is a plain contiguous tensor, and nothing intercepts operators; else
    None. To make a view of each gradient, as `of` needs it in other cases, takes longer than the operator."""
    stats, first_bad = zeros(device), no_position(device)
    return (stats, first_bad) if ops.call_directly("grad_stats_", list(grads), stats, first_bad) else None


ALL_FINITE = -1


class Watch:
    """Checks gradients for non-finite elements as they become ready, on their device. The host reads the result once
    per accumulation cycle."""

    def __init__(self) -> None:
        self._stats: torch.Tensor | None = None
        self._found: list[tuple[torch.Tensor, Sequence[int]]] = []

    def check(self, grads: Sequence[torch.Tensor], numbers: Sequence[int]) -> None:
        """Queues the check of these gradients on the current stream. All calls must be for one device. numbers: the
        number that `first` returns for each gradient."""
        if not grads:
            return
        if self._stats is None:
            self._stats = zeros(grads[0].device)
        first = no_position(grads[0].device)
        ops.call("grad_stats_", [dense.contiguous(g.detach()) for g in grads], self._stats, first)
        self._found.append((first, numbers))

    def first(self) -> int:
        """Returns the number of the first checked gradient with a non-finite element, or ALL_FINITE, and resets the
        watch. Waits for the current stream, which must come after the streams of the checks."""
        found, self._found, self._stats = self._found, [], None
        if not found:
            return ALL_FINITE
        places = torch.cat([first for first, _ in found]).tolist()
        hits = (numbers[p] for p, (_, numbers) in zip(places, found, strict=True) if p != NO_POSITION)
        return next(hits, ALL_FINITE)


def first_nonfinite(grads: Sequence[torch.Tensor]) -> int:
    """Returns the position of the first gradient with a non-finite element, or ALL_FINITE. Waits for the device."""
    watch = Watch()
    watch.check(grads, range(len(grads)))
    return watch.first()
