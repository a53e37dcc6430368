"""Computes the global gradient norm, summed over the ranks that hold shards of gradients, and the clip coefficient."""

import math
from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_ext.comm import group_calls
from torch_ext.grads import errors
from torch_ext.grads import stats as grads_stats
from torch_ext.grads.stats import ALL_FINITE, first_nonfinite
from torch_ext.native import direct_call, ops, warning
from torch_ext.tensors import dense

_MARK = "_torch_ext_clipping"
_AGREED = "_torch_ext_agreed"


class NormGroup(NamedTuple):
    """Gradients whose statistics are all-reduced over the same process groups."""

    groups: tuple[Any, ...]
    """Process groups, all-reduced over one after the other; empty if every gradient is whole."""
    positions: list[int]
    """Positions of these gradients in the list of all gradients."""
    stats: Tensor | None
    """The gradients' statistics on this rank, if the reduction has computed them; else the gradients are read."""


class Clipping:
    """The norm and clip coefficient of a set of gradients, as one-element tensors on the gradients' device.

    Valid while the gradients stay unmodified. Each gradient tensor is marked by an attribute: its id would not do, as
    ids are reused and each backward may create new tensors. Version counters show whether a gradient was modified.
    """

    def __init__(
        self,
        norm: Tensor,
        clip_coef: Tensor,
        found_inf: Tensor,
        first_bad: Tensor,
        only_measured: bool,
        stats: Tensor,
        unscaled: bool,
    ) -> None:
        self.norm = norm
        self.clip_coef = clip_coef
        self.found_inf = found_inf
        self.first_bad = first_bad  # int64 [1]: index of the first gradient that is not finite
        self.only_measured = only_measured  # no clip limit, so modifying the gradients afterwards is no error
        self.stats = stats  # grad_stats_ over all ranks
        self._unscaled = unscaled  # the loss scale was known when the norm was computed, and divided out
        self.used = False
        self._ids: list[int] = []  # of the gradients
        self._versions = array("q")  # their version counters

    def attach(self, grads: Sequence[Tensor]) -> None:
        """Marks the gradients as belonging to this clip, and notes their version counters."""
        self._ids, self._versions = list(map(id, grads)), direct_call.versions(list(grads), 0)
        for g in grads:
            setattr(g, _MARK, self)

    def belongs_to(self, grads: Sequence[Tensor]) -> bool:
        """Whether this clip is valid for these gradients: all gradients of `attach`, or a subset because the rest was
        dropped (the coefficient still holds; a norm that was only measured does not). False for foreign gradients. If a
        gradient was modified or replaced, raises RuntimeError, unless the clip was used already or only measured; then
        False."""
        marked = [getattr(g, _MARK, None) is self for g in grads]
        if not any(marked):
            return False
        if all(marked) and self._unmodified(grads):
            return len(grads) == len(self._versions) or not self.only_measured
        if self.used or self.only_measured:
            return False
        raise RuntimeError(
            "gradients were written between clip_grad_norm_(optimizer, ...) and step(): the coefficient does not "
            "fit them any more. Clip last, or in place with clip_grad_norm_(parameters, ...); optimizer.zero_grad() "
            "discards the clip"
        )

    def _unmodified(self, grads: Sequence[Tensor]) -> bool:
        """Whether each of these gradients has the version counter that it had in `attach`."""
        ids, versions = list(map(id, grads)), direct_call.versions(list(grads), 0)
        if ids == self._ids:
            return versions == self._versions
        known = dict(zip(self._ids, self._versions, strict=True))
        return all(known.get(one) == version for one, version in zip(ids, versions, strict=True))

    def refuse_scale(self, grad_scale: Tensor) -> None:
        """Raises RuntimeError if gradients were clipped while they were still multiplied by a loss scale, which became
        known only afterwards."""
        if grad_scale.numel() and not (self._unscaled or self.only_measured):
            raise RuntimeError(
                "clip_grad_norm_(optimizer, ...) came before scaler.unscale_(optimizer): its norm is of gradients "
                "that are still multiplied by the loss scale. Call unscale_ first, then clip (fp16 gradients need "
                "policy.grad_scaler() for that); optimizer.zero_grad() discards the clip"
            )

    def limited(self, max_norm: float, grad_scale: Tensor) -> "Clipping":
        """Returns what `measure` would return for the same gradients, without reading them again."""
        with torch.no_grad():
            return _decided(self.stats, self.first_bad, max_norm, grad_scale)

    def warn_if_skipped(self, members: Sequence[Any], grads: Sequence[Tensor]) -> None:
        """Warns which gradient caused a step to be skipped, if that is known without waiting for a device."""
        if self.found_inf.device.type == "cpu" and self.found_inf.item() != 0:
            first = int(self.first_bad.item())
            # first_bad is no position in grads if the statistics came from a reduction, which does not find positions,
            # or if some gradients were dropped since.
            if first >= len(members) or len(members) < len(self._versions):
                first = first_nonfinite(grads)
            who = f"the gradient of {members[first].name}" if first != ALL_FINITE else "the norm of the gradients"
            warning.warn(f"a step was skipped: {who} is not finite", RuntimeWarning)


def measure(
    grads: Sequence[Tensor],
    max_norm: float,
    grad_scale: Tensor,
    parts: Sequence[NormGroup] | None = None,
    name_of: Callable[[int], str] = "gradient {}".format,
) -> Clipping:
    """Returns norm and clip coefficient of the gradients (F32, BF16 or F16 in any memory order, on one device).

    Reads each gradient once. grad_scale: the loss scale to divide out; fp32, one element, or empty for none. parts:
    given if some gradients are shards of which other ranks hold the rest; then this is a collective call. None: each
    gradient is whole. name_of: returns the name of a gradient, for messages.
    """
    with torch.no_grad():
        device = grads[0].device if grads else torch.device("cpu")
        found = grads_stats.of_plain(grads, device) if parts is None else None
        if found is None:
            for i, grad in enumerate(grads):
                if grad.layout is not torch.strided:
                    errors.refuse_sparse(grad, name_of(i))
            runs = [dense.contiguous(g.detach()) for g in grads]
            found = grads_stats.of(runs, device) if parts is None else _summed(runs, parts, device)
        return _decided(*found, max_norm, grad_scale)


def _decided(stats: Tensor, first_bad: Tensor, max_norm: float, grad_scale: Tensor) -> Clipping:
    norm, clip_coef, found_inf = (torch.zeros((), dtype=torch.float32, device=stats.device) for _ in range(3))
    ops.call("grad_norm_", stats, grad_scale, max_norm, norm, clip_coef, found_inf)
    return Clipping(norm, clip_coef, found_inf, first_bad, max_norm == math.inf, stats, grad_scale.numel() > 0)


def _summed(runs: Sequence[Tensor], parts: Sequence[NormGroup], device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the statistics over all ranks, and the position of the first bad gradient. Statistics are integers, so
    that their sum has the same bits for every split."""
    stats, first_bad = grads_stats.zeros(device), grads_stats.no_position(device)
    for part in parts:
        own = part.stats
        if own is None:
            own, first = grads_stats.of([runs[i] for i in part.positions], device)
            positions = torch.tensor([*part.positions, grads_stats.NO_POSITION], device="cpu")
            position = positions.to(device, non_blocking=True)[first.clamp(max=len(part.positions))]
            first_bad = torch.minimum(first_bad, position)
        for group in part.groups:
            group_calls.all_reduce(own, group, "the norm of the gradients over all ranks")
        stats += own
    return stats, first_bad


def mark_agreed(found_inf: Tensor) -> Tensor:
    """Marks the tensor as one on whose value all ranks have agreed, and returns it."""
    setattr(found_inf, _AGREED, True)
    return found_inf


def is_agreed(found_inf: object) -> bool:
    """Whether the tensor is marked by `mark_agreed`."""
    return bool(getattr(found_inf, _AGREED, False))
