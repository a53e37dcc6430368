"""The sums of a step that measures itself (`measure_health`)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_ext.native import constants


class Measurement:
    """The sums of one step, for all parameters that take part in it."""

    def __init__(self) -> None:
        self.rows: dict[Tensor, Tensor] = {}
        """By parameter; rows of tx_adamw_args.healths."""
        self._steps: list[Tensor] = []

    def record_steps(self, steps: Sequence[Tensor]) -> None:
        """Records the step counts of the parameters after the step, as tensors: this waits for no device."""
        devices = dict.fromkeys(step.device for step in steps)
        self._steps = [torch.stack([step for step in steps if step.device == device]).max() for device in devices]

    @property
    def step(self) -> int:
        """The number of the measured step: the largest step count of its parameters."""
        return max((int(step) for step in self._steps), default=0)

    def row(self, param: Tensor, device: torch.device) -> Tensor:
        """Returns the row of a parameter, to which the step adds: zeros at first, on the device of its state."""
        return self.rows.setdefault(param, torch.zeros(constants.HEALTH_LEN, dtype=torch.int64, device=device))


class Measuring:
    """The measurement that is requested of the next step, and the last one that was made."""

    def __init__(self) -> None:
        self.next: Measurement | None = None
        """Where the next step adds its sums; None: it does not measure."""
        self.last: Measurement | None = None
        """The measurement of the last step that measured."""

    def end(self, steps: Sequence[Tensor]) -> None:
        """Ends the requested measurement after its step. steps: the step counts of the parameters that took part."""
        self.last, self.next = self.next, None
        if self.last is not None:
            self.last.record_steps(steps)
