"""Records of what steps change in weights, for a weight publisher. They are not optimizer states, and in no state_dict.

    changed    uint8, a bit for each weight: whether its bits changed
    moved      bfloat16, for each block of 128: an upper bound of how far its masters moved; infinite: unknown
    distance   uint8, 4 bits for each weight, if wanted: how far it moved, in steps of its dtype

The tensors are those of tx_adamw_args, for this rank's elements of a parameter. Steps add to them; the publisher reads
and zeroes them.
"""

import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from torch_ext.native import constants

KEYS = ("changed", "moved", "distance")


class Watcher(Protocol):
    """A weight publisher, which is told of changes that hooks of step() do not report."""

    def before_writing(self) -> None:
        """Called before weights or masters are written outside of step(): by resync_masters(), or in a backward that
        steps parameters as their gradients are ready."""

    def after_writing(self) -> None:
        """Called after that write."""

    def stepped(self) -> None:
        """Called after parameters were stepped without a step() that returned: it raised, or zero_grad() has kept what
        a backward stepped."""

    def weights_move(self) -> None:
        """Called before weights may be offloaded, or loaded back."""

    def weights_moved(self, params: Iterable[Tensor], offloaded: bool) -> None:
        """Called after weights were offloaded, or else loaded back, with their content."""


class WeightChanges:
    """The records of all parameters of an optimizer."""

    def __init__(self, exact: bool) -> None:
        """exact: record distances, too."""
        self._exact = exact
        self._of: dict[Tensor, dict[str, Tensor]] = {}
        self.generation = 0
        """How often a record was created or dropped."""
        self.watcher: weakref.ref[Watcher] | None = None
        """The publisher that reads the records."""

    def record_of(self, param: Tensor, numel: int, device: torch.device) -> dict[str, Tensor]:
        """Returns the record of a parameter of which this rank has `numel` elements, on the device of its state. If
        there was a record of another size (of another part of the parameter, say), the new one says that nothing is
        known of the weights."""
        kept = self._of.get(param)
        if kept is not None and (kept["changed"].numel(), kept["changed"].device) == (-(-numel // 8), device):
            return kept
        if kept is not None and kept["changed"].numel() == -(-numel // 8):
            made = {key: value.to(device) for key, value in kept.items()}
        else:
            made = _zeros(numel, device, self._exact and param.dtype != torch.float32)
            if kept is not None:
                made["moved"].fill_(torch.inf)
        self._of[param] = made
        self.generation += 1
        return made

    def all_written(self) -> None:
        """Called when states were loaded: marks all records, since how far weights moved is then unknown."""
        for kept in self._of.values():
            mark_written(kept)

    def keep_only(self, params: set[Tensor]) -> None:
        """Drops the records of all other parameters."""
        for gone in [p for p in self._of if p not in params]:
            del self._of[gone]
            self.generation += 1


def _zeros(numel: int, device: torch.device, exact: bool) -> dict[str, Tensor]:
    made = {
        "changed": torch.zeros(-(-numel // 8), dtype=torch.uint8, device=device),
        "moved": torch.zeros(-(-numel // constants.BLOCK), dtype=torch.bfloat16, device=device),
    }
    if exact:
        made["distance"] = torch.zeros(-(-numel // 2), dtype=torch.uint8, device=device)
    return made


def mark_written(kept: Mapping[str, Any]) -> None:
    """Marks a record after a write to weights or masters outside of a step: how far they moved is unknown."""
    if "moved" in kept:
        kept["moved"].fill_(torch.inf)
