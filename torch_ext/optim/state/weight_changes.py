"""What the step says of the weights that it changes, for who publishes them: kept beside the states, not among them.

    changed    uint8, a bit for each weight: its bits were changed
    moved      bfloat16, for each block of 128: at most how far its masters went; infinite: nobody knows
    distance   uint8, 4 bits for each weight, where they are wanted: how far it went, in steps of its dtype

as tx_adamw_args has them, each of this rank's elements of a parameter. Steps add to them; the publisher reads them and
makes them zero. They are in no state_dict.
"""

import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from torch_ext.native import constants

KEYS = ("changed", "moved", "distance")


class Watcher(Protocol):
    """Who is told what the hooks of step() do not tell."""

    def before_writing(self) -> None:
        """Weights or masters are about to be written outside of step(): in a backward that steps parameters as their
        gradients are ready, or by resync_masters()."""

    def after_writing(self) -> None:
        """They were."""

    def stepped(self) -> None:
        """Steps were taken that step() does not tell of: it raised, or what a backward stepped is kept without it."""

    def weights_move(self) -> None:
        """Weights may be about to leave their memory, or to come back."""

    def weights_moved(self, params: Iterable[Tensor], away: bool) -> None:
        """They did, with their content."""


class WeightChanges:
    """Of all parameters of an optimizer."""

    def __init__(self, exact: bool) -> None:
        """exact: distances, too."""
        self._exact = exact
        self._of: dict[Tensor, dict[str, Tensor]] = {}
        self.made = 0
        """How often something was made, or dropped."""
        self.watcher: weakref.ref[Watcher] | None = None
        """Who publishes them."""

    def beside(self, param: Tensor, numel: int, device: torch.device) -> dict[str, Tensor]:
        """What is kept of a parameter of which this rank has so many elements, where its state lies. Where there was
        something else, for another part of it say, nothing is known of the weights."""
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
        self.made += 1
        return made

    def all_written(self) -> None:
        """Other states were loaded, which are right for weights that no step has left."""
        for kept in self._of.values():
            written(kept)

    def keep_only(self, params: set[Tensor]) -> None:
        """Drops what is kept of all other parameters."""
        for gone in [p for p in self._of if p not in params]:
            del self._of[gone]
            self.made += 1


def _zeros(numel: int, device: torch.device, exact: bool) -> dict[str, Tensor]:
    made = {
        "changed": torch.zeros(-(-numel // 8), dtype=torch.uint8, device=device),
        "moved": torch.zeros(-(-numel // constants.BLOCK), dtype=torch.bfloat16, device=device),
    }
    if exact:
        made["distance"] = torch.zeros(-(-numel // 2), dtype=torch.uint8, device=device)
    return made


def written(kept: Mapping[str, Any]) -> None:
    """Somebody else wrote to the weights, or to their masters: how far they went, nobody knows."""
    if "moved" in kept:
        kept["moved"].fill_(torch.inf)
