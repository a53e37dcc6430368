"""Compares masters with their weights: finds weights that were modified outside the optimizer, and resyncs masters."""

import itertools
from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_ext.native import constants, ops
from torch_ext.optim.state import weight_changes
from torch_ext.optim.state.param_state import ParamState
from torch_ext.optim.state.state_dtypes import MASTERS
from torch_ext.optim.state.stateful import first_names
from torch_ext.tensors import dense

# on_external_write -> what the step's operator does where checksums differ. For "error" weights are checked before the
# step, so that the operator itself need not.
EXTERNAL_MODES = {
    "ignore": constants.EXTERNAL_IGNORE,
    "resync": constants.EXTERNAL_RESYNC,
    "error": constants.EXTERNAL_IGNORE,
}


def resync(members: Sequence[ParamState], force: bool = False) -> Tensor:
    """Resets masters to their weights where they don't round to them (everywhere with `force`). A remainder is legal
    with any weight: remainders are reset in the blocks whose checksum does not fit the weights.

    members: each with a master. Returns how many elements of each changed: int64 [members].
    """
    changed = _counts(members)
    if force:
        if any(m.changes for m in members):  # `changed` misses a written weight whose remainder is 0 already
            _note_written(members, modified(members))
        _run(ops.call, "master_resync_", members, MASTERS, changed, True)
    else:
        _run(ops.call, "master_resync_", members, ("master_param",), changed)
        remainders = ("master_remainder",)
        _run(ops.call, "master_checksum_", members, remainders, changed, constants.CHECKSUM_RESYNC)  # renews them
    _note_written(members, changed)
    renewed = MASTERS if force else ("master_param",)
    if not force and changed.device.type == "cpu":
        # Renewing the checksums of fp32 masters reads samples that are far apart in memory, which takes a sixth of the
        # time. Skip members in which nothing changed: their checksums are right, or the next step compares them once
        # more. Not on a device, where `changed` would have to be waited for.
        members = [m for m, n in zip(members, changed.tolist(), strict=True) if n]
    if members:
        _run(ops.call, "master_checksum_", members, renewed, _counts(members), constants.CHECKSUM_RENEW)
    return changed


def _note_written(members: Sequence[ParamState], changed: Tensor) -> None:
    """Tells a weight publisher which members were written. Waits for the device if there is a publisher."""
    if any(m.changes for m in members):
        for m, n in zip(members, changed.tolist(), strict=True):
            if n:
                weight_changes.mark_written(m.changes)


def modified(members: Sequence[ParamState]) -> Tensor:
    """Returns how many elements of each member `resync` would change: int64 [members]. Changes nothing."""
    found = _counts(members)
    _run(ops.call_unversioned, "master_resync_", members, ("master_param",), found, False, True)
    _run(ops.call_unversioned, "master_checksum_", members, ("master_remainder",), found, constants.CHECKSUM_CHECK)
    return found


def _run(
    call_operator: Callable[..., None],
    name: str,
    members: Sequence[ParamState],
    among: Container[str],
    counts: Tensor,
    *options: Any,
) -> None:
    """Calls an operator, once for each device, on the members whose kind of master is in `among`; adds to their counts.
    call_operator: ops.call or ops.call_unversioned."""
    chosen = [m.kinds.master in among for m in members]
    for device in dict.fromkeys(m.master.device for m in itertools.compress(members, chosen)):
        here = [one and m.master.device == device for m, one in zip(members, chosen, strict=True)]
        rows = [_row(m) if one else (dense.EMPTY,) * 3 for m, one in zip(members, here, strict=True)]
        if any(weight.numel() for weight, _, _ in rows):
            weights, masters, checksums = (list(column) for column in zip(*rows, strict=True))
            found = counts if counts.device == device else torch.zeros_like(counts, device=device)
            call_operator(name, weights, masters, *([checksums] if name == "master_checksum_" else []), found, *options)
            if found is not counts:
                counts += found.to(counts.device)


def _row(m: ParamState) -> tuple[Tensor, Tensor, Tensor]:
    weight = m.weight.detach().to(m.master.device)  # the host's, for a member that is stepped there
    return dense.in_order_of(m.master, weight), dense.flat(m.master), m.state["checksum"]


def _counts(members: Sequence[ParamState]) -> Tensor:
    return torch.zeros(len(members), dtype=torch.int64, device=members[0].weight.device if members else "cpu")


def refuse_modified(members: Sequence[ParamState]) -> None:
    """Raises RuntimeError, naming the members, where masters do not round to their weights. Compares values, not
    version counters: loading the same weights again is no error.
    """
    counts = modified(members).tolist()
    found = [f"{m.name} ({n} elements)" for m, n in zip(members, counts, strict=True) if n]
    if found:
        raise RuntimeError(
            f"on_external_write='error': {first_names(found)} no longer what the master rounds to: modified outside "
            "the optimizer since the last step. Call resync_masters() to make new masters from the weights"
        )
