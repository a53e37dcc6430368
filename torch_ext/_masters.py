"""fp32 masters and the weights beside them: who was written by somebody else, and what to do about it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from torch_ext import _ops, _tensors

if TYPE_CHECKING:
    from torch_ext._plan import Member


class Seen(NamedTuple):
    """How a weight looked when its master was last known to round to it; a write by somebody else shows in it."""

    version: int  # of the parameter
    address: int
    master: Tensor


def look(member: "Member") -> Seen:
    return Seen(member.version, member.place.data_ptr(), member.master)


def resync(members: Sequence["Member"], force: bool = False) -> Tensor:
    """Makes masters their weights where they don't round to them (everywhere with `force`).

    members: each with a master. Returns how many elements of each changed: int64 [members].
    """
    masters = [m.master for m in members]
    changed = torch.zeros(len(members), dtype=torch.int64, device=masters[0].device if masters else None)
    weights = [
        _tensors.in_order_of(master, m.weight.detach().to(master.device))
        for master, m in zip(masters, members, strict=True)
    ]
    if members:
        _ops.call("master_resync_", weights, [_tensors.flat(master) for master in masters], changed, force)
    return changed


def refuse_written(members: Sequence["Member"]) -> None:
    """RuntimeError, naming them, where weights are not what their masters round to. By content, not by the counters: a
    load of the same weights is no error.
    """
    copies = [m._replace(state={m.kinds.master: m.master.clone()}) for m in members if m.kinds.master]
    counts = resync(copies).tolist()
    written = [f"{m.name} ({n} elements)" for m, n in zip(members, counts, strict=True) if n]
    if written:
        raise RuntimeError(
            f"on_external_write='error': {', '.join(written)} no longer what the master rounds to: written by somebody "
            "else since the last step. Call resync_masters() to take the weights over"
        )
