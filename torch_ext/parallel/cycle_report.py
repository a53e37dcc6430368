"""What ranks tell each other at the end of a cycle (see `parallel/reducer.py`)."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from torch_ext.grads.errors import READY

# Of a parameter that got no gradient in this backward, and has a `.grad` all the same: it is what an earlier
# reduction left, or anything else (of a micro-batch under no_sync(), zeros, assigned by the user).
REDUCED, HELD = 4, 8


class CycleReport(NamedTuple):
    """What a rank tells the others at the end of a cycle."""

    cycle: int
    nonfinite: int  # the position of a parameter, or ALL_FINITE
    words: torch.Tensor  # of `Coalescing`
    grad_states: torch.Tensor  # uint8, by parameter: READY, MISSING, FROZEN (grads/errors.py), and REDUCED or HELD

    @staticmethod
    def of(cycle: int, nonfinite: int, words: torch.Tensor, grad_states: bytearray) -> torch.Tensor:
        """As it travels."""
        numbers = torch.cat([torch.tensor([cycle, nonfinite], dtype=torch.int64), words])
        return torch.cat([numbers.view(torch.uint8), torch.frombuffer(grad_states, dtype=torch.uint8)])

    @classmethod
    def read(cls, row: torch.Tensor, n_params: int) -> "CycleReport":
        numbers, grad_states = row[: row.numel() - n_params].view(torch.int64), row[row.numel() - n_params :]
        cycle, nonfinite = numbers[:2].tolist()
        return cls(cycle, nonfinite, numbers[2:], grad_states)


def agreed(grad_states: Sequence[torch.Tensor]) -> tuple[list[bool], list[bool]]:
    """From each rank's states: which parameters have a gradient on some rank; which have on every rank what an earlier
    reduction left, and got no gradient since."""
    states = torch.stack(list(grad_states))
    anywhere, left = states.bitwise_and(READY | REDUCED | HELD).any(dim=0), states.bitwise_and(REDUCED).all(dim=0)
    return anywhere.tolist(), left.tolist()
