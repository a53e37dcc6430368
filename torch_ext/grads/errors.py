"""Errors about gradients: the same words on every rank and under every strategy."""

from collections.abc import Sequence

import torch
from torch import Tensor

FOREIGN_SCALER = (
    "torch.amp.GradScaler looks for overflow in `.grad`, but under a sharded strategy each rank steps other gradients, "
    "so that ranks would skip different steps: use policy.grad_scaler(), which agrees with the other ranks"
)

_SHOWN = 8


def refuse_sparse(grad: Tensor, who: str) -> None:
    """Raises RuntimeError for a gradient that is not strided. who: begins the message."""
    if grad.layout is not torch.strided:
        raise RuntimeError(
            f"{who} is sparse ({grad.layout}): torch_ext steps dense gradients; build the embedding with sparse=False, "
            "or give this parameter to torch.optim.SparseAdam"
        )


def refuse_busy(doing: str, forwards_running: int, backward: bool) -> None:
    """Raises RuntimeError if a forward or a backward of the model is running. doing: begins the message."""
    if forwards_running or backward:
        raise RuntimeError(f"{doing} during a {'backward' if backward else 'forward'}: call it between steps")


def names_of(names: Sequence[str], positions: Sequence[int]) -> str:
    """Returns the names at the first _SHOWN positions, and how many more there are, for messages."""
    more = f" and {len(positions) - _SHOWN} more" if len(positions) > _SHOWN else ""
    return ", ".join(repr(names[i]) for i in positions[:_SHOWN]) + more
