"""Errors about gradients: the same words on every rank and under every strategy."""

from collections.abc import Sequence

import torch

from torch_ext.comm.lost_ranks import ranks_called
from torch_ext.grads.stats import ALL_FINITE

# The state of a parameter's gradient at the end of a backward that reduces; two bits. READY | FROZEN: its gradient was
# ready, and it was frozen afterwards.
MISSING, READY, FROZEN = range(3)

FOREIGN_SCALER = (
    "torch.amp.GradScaler looks for overflow in `.grad`, but under a sharded strategy each rank steps other gradients, "
    "so that ranks would skip different steps: use policy.grad_scaler(), which agrees with the other ranks"
)

_SHOWN = 8


def refuse_step(failure: str | None, broken: bool, nonfinite: Sequence[str]) -> None:
    """RuntimeError where gradients must not be stepped. failure: why nothing can be reduced any more. broken: a
    backward raised when some of its sums were added to shards. nonfinite: parameters that the check for NaN named."""
    if failure is not None:
        raise RuntimeError(f"step() after an exchange that failed: {failure}")
    if broken:
        raise RuntimeError(
            "step() after a backward that raised when some of its sums were added already: call zero_grad() and "
            "repeat the micro-batches"
        )
    if nonfinite:
        raise RuntimeError(
            f"step() with gradients that have NaN or Inf ({', '.join(map(repr, nonfinite))} and perhaps others), as "
            "backward said (check_for_nan_in_grad): call zero_grad() first"
        )


def refuse_busy(doing: str, forwards_running: int, backward: bool) -> None:
    """RuntimeError where a forward or a backward of the model is under way."""
    if forwards_running or backward:
        raise RuntimeError(f"{doing} during a {'backward' if backward else 'forward'}: call it between steps")


def refuse_nonfinite(names: Sequence[str], by_rank: Sequence[int]) -> None:
    """RuntimeError where a rank found a gradient that is not finite. by_rank: its position, or ALL_FINITE."""
    found = [f"{names[i]!r} on rank {rank}" for rank, i in enumerate(by_rank) if i != ALL_FINITE]
    if found:
        raise RuntimeError(
            f"gradients with NaN or Inf before communication (check_for_nan_in_grad): {', '.join(found)}. "
            "Nothing was stepped; call zero_grad() before going on."
        )


def refuse_frozen(names: Sequence[str], grad_states: Sequence[torch.Tensor]) -> None:
    """RuntimeError where ranks do not train the same parameters. grad_states: as for `refuse_missing`."""
    frozen = torch.stack([states.bitwise_and(FROZEN).ne(0) for states in grad_states])
    mixed = (frozen.any(0) & ~frozen.all(0)).nonzero().flatten().tolist()
    if not mixed:
        return
    parts = []
    for i in mixed[:_SHOWN]:
        where, elsewhere = frozen[:, i].nonzero().flatten().tolist(), (~frozen[:, i]).nonzero().flatten().tolist()
        parts.append(f"{names[i]!r} is frozen on {ranks_called(where)} and trainable on {ranks_called(elsewhere)}")
    more = f" and {len(mixed) - _SHOWN} more" if len(mixed) > _SHOWN else ""
    raise RuntimeError(
        f"the ranks train different parameters: {'; '.join(parts)}{more}. Call requires_grad_() on every rank alike, "
        "and zero_grad() before going on."
    )


def refuse_missing(names: Sequence[str], grad_states: Sequence[torch.Tensor]) -> None:
    """RuntimeError where a gradient is missing. grad_states: by rank, the state of each parameter's (uint8)."""
    missing = [states.bitwise_and(READY | FROZEN).eq(MISSING).nonzero().flatten().tolist() for states in grad_states]
    parts = [f"{names_of(names, params)} on rank {rank}" for rank, params in enumerate(missing) if params]
    if not parts:
        return
    raise RuntimeError(
        f"no gradient is ready for {'; '.join(parts)}. The loss does not depend on the parameter, or it was replaced "
        "after parallelize, or checkpointing runs with use_reentrant=True. If parameters may be unused, call "
        "parallelize(..., find_unused_parameters=True): they then count as zero. Call zero_grad() before going on."
    )


def names_of(names: Sequence[str], positions: Sequence[int]) -> str:
    """The names of the first ones, and how many more there are."""
    more = f" and {len(positions) - _SHOWN} more" if len(positions) > _SHOWN else ""
    return ", ".join(repr(names[i]) for i in positions[:_SHOWN]) + more
