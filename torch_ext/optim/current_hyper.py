"""The table of the groups' hyper-parameters, kept from step to step while the groups are unchanged."""

import operator
from collections.abc import Sequence
from typing import Any

import torch

from torch_ext.params import param_groups
from torch_ext.params.param_groups import HyperparameterTable


class CurrentHyper:
    """Makes the table of an optimizer's hyper-parameters again when the groups have changed."""

    def __init__(self) -> None:
        self._known: tuple[list[Any], HyperparameterTable] | None = None
        self._values: Sequence[Any] = ()
        """The objects in the groups that the table was made from; empty if not all of them are immutable. To compare
        objects by identity takes a third of the time of a key."""
        self._kept = False  # whether the table was given to a caller who keeps it

    def table(self, groups: list[dict[str, Any]], device: torch.device, keeps: bool) -> HyperparameterTable:
        """Returns the groups' hyper-parameters as the operator takes them. keeps: the caller keeps the table; else the
        next call may change it. ValueError or TypeError, naming the group, for illegal values."""
        values, known = param_groups.values_of(groups), self._known
        if known is not None and len(values) == len(self._values) and all(map(operator.is_, values, self._values)):
            self._kept |= keeps
            return known[1]
        key = param_groups.key_of(groups, device)
        if known is None or known[0] != key:
            if known is not None and not self._kept and param_groups.update_lrs(known[1], known[0], key, len(groups)):
                known = key, known[1]
            else:
                known, self._kept = (key, param_groups.hyper(groups, device)), False
            self._known = known
        self._values = values if all(map(param_groups.is_immutable, values)) else ()
        self._kept |= keeps
        return known[1]
