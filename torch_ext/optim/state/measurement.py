"""The sums of a step that was asked to measure itself."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_ext.native import constants


class Measurement:
    """Of all parameters that the step takes part in."""

    def __init__(self) -> None:
        self.rows: dict[Tensor, Tensor] = {}
        """By parameter, as tx_adamw_args.healths has them."""
        self._steps: list[Tensor] = []

    def taken(self, steps: Sequence[Tensor]) -> None:
        """By parameters whose steps have these numbers, where they lie. Waits for no device."""
        devices = dict.fromkeys(step.device for step in steps)
        self._steps = [torch.stack([step for step in steps if step.device == device]).max() for device in devices]

    @property
    def step(self) -> int:
        """The number of the step, where one was taken."""
        return max((int(step) for step in self._steps), default=0)

    def row(self, param: Tensor, device: torch.device) -> Tensor:
        """Zeros for the step to add to, beside the parameter's state."""
        return self.rows.setdefault(param, torch.zeros(constants.HEALTH_LEN, dtype=torch.int64, device=device))


class Measuring:
    """What was asked of steps, and what came of it."""

    def __init__(self) -> None:
        self.next: Measurement | None = None
        """Of the next step, where it is to measure itself."""
        self.last: Measurement | None = None
        """Of the last step that did."""

    def end(self, steps: Sequence[Tensor]) -> None:
        """The next step was taken, by parameters whose steps have these numbers: none is to measure itself any more."""
        self.last, self.next = self.next, None
        if self.last is not None:
            self.last.taken(steps)
