"""The check before communication (check_for_nan_in_grad): which gradient has a NaN or an Inf."""

from collections.abc import Sequence

import torch

from torch_ext import _ops, _stats, _tensors

ALL_FINITE = -1


class Watch:
    """Gradients of one cycle, looked at as they come, on their device; the host reads once what was found."""

    def __init__(self) -> None:
        self._stats: torch.Tensor | None = None
        self._found: list[tuple[torch.Tensor, Sequence[int]]] = []

    def look(self, grads: Sequence[torch.Tensor], numbers: Sequence[int]) -> None:
        """On the current stream. All looks have one device. numbers: what `first` calls each gradient."""
        if not grads:
            return
        if self._stats is None:
            self._stats = _stats.zeros(grads[0].device)
        first = _stats.nobody(grads[0].device)
        _ops.call("grad_stats_", [_tensors.contiguous(g.detach()) for g in grads], self._stats, first)
        self._found.append((first, numbers))

    def first(self) -> int:
        """The number of the first gradient, in the order of looks, with a non-finite element, or ALL_FINITE. Waits for
        the current stream, which must follow those of the looks. What was found is forgotten."""
        found, self._found, self._stats = self._found, [], None
        if not found:
            return ALL_FINITE
        places = torch.cat([first for first, _ in found]).tolist()
        hits = (numbers[p] for p, (_, numbers) in zip(places, found, strict=True) if p != _stats.NOBODY)
        return next(hits, ALL_FINITE)


def first_nonfinite(grads: Sequence[torch.Tensor]) -> int:
    """The position of the first gradient with a non-finite element, or ALL_FINITE. Waits for the device."""
    watch = Watch()
    watch.look(grads, range(len(grads)))
    return watch.first()
