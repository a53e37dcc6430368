"""Weights that somebody wrote to since the last step: the blocks of which nobody knows how far they went.

Note: three ways, by what there is to compare with. Beside a remainder, the step left checksums of all weights. An fp32
master must round to its weight. A weight that is its own master has its version counter and address, by which writes of
torch show. This is asked before a delta is made. And it is asked afterwards, too: the next step makes a weight its
master's nearest again where it did not notice the write, and then it does not know that this changes what was
published. Blocks of which no step changed a bit need none of it: they are compared with the checksums of what was
published.
"""

import ctypes
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_ext.native import adamw_args, constants, ops
from torch_ext.optim.cpu_offload.staged_args import threads
from torch_ext.optim.state import weight_changes
from torch_ext.optim.state.param_state import ParamState
from torch_ext.tensors import dense
from torch_ext.weight_sync import delta_library

_AT_A_TIME = 1 << 20  # elements that are compared
_BLOCKS = constants.CHECKSUM // constants.BLOCK


def mark(members: Sequence[ParamState]) -> list[ParamState]:
    """Makes `moved` infinite where a weight with a master is not what the last step left. Returns those of which there
    are such weights, as far as that is known without waiting for a device."""
    found = []
    for m in members:
        if m.changes and m.kinds.master == "master_remainder" and _mark_by_checksum(m):
            found.append(m)
        elif m.changes and m.kinds.master == "master_param" and _mark_by_master(m):
            found.append(m)
    return found


def _mark_by_checksum(m: ParamState) -> bool:
    now = torch.zeros_like(m.state["checksum"])
    weight = dense.in_order_of(m.master, m.beside)
    none = torch.empty(0, dtype=torch.int64, device=now.device)
    ops.call("master_checksum_", [weight], [dense.flat(m.master)], [now], none, constants.CHECKSUM_RENEW)
    stale = now != m.state["checksum"]
    if stale.is_cpu and not bool(stale.any()):
        return False
    moved = m.changes["moved"]
    moved.masked_fill_(stale.repeat_interleave(_BLOCKS)[: moved.numel()], torch.inf)
    return True


def _mark_by_master(m: ParamState) -> bool:
    weight, master = dense.flat(m.beside).view(-1), dense.flat(m.master).view(-1)
    moved = m.changes["moved"]
    if weight.is_cpu:
        return _mark_on_host(weight, master, moved)
    for begin in range(0, weight.numel(), _AT_A_TIME):
        part = weight[begin : begin + _AT_A_TIME]
        rounded = master[begin : begin + _AT_A_TIME].to(weight.dtype)
        differ = (part != rounded) & ~(part.isnan() & rounded.isnan())
        _mark_blocks(moved[begin // constants.BLOCK :], differ)
    return True


def _mark_on_host(weight: Tensor, master: Tensor, moved: Tensor) -> bool:
    marked = ctypes.c_int64()
    given = [adamw_args.argument(t) for t in (weight, master, moved)]
    if weight.numel():
        delta_library.call("mark", *given, threads(), ctypes.addressof(marked))
    return marked.value > 0


def _mark_blocks(moved: Tensor, differ: Tensor) -> None:
    """Makes it infinite for the blocks of 128 of which an element differs."""
    whole = differ.numel() // constants.BLOCK
    of_block = differ[: whole * constants.BLOCK].view(whole, constants.BLOCK).any(1)
    moved[:whole].masked_fill_(of_block, torch.inf)
    moved[whole : whole + 1].masked_fill_(differ[whole * constants.BLOCK :].any(), torch.inf)


class _Seen(NamedTuple):
    """A weight when somebody was known to have noticed all that was written to it."""

    param: Tensor
    place: Tensor
    """As ParamState's."""
    version: int
    address: int

    @classmethod
    def of(cls, param: Tensor, place: Tensor) -> "_Seen":
        version = param._version + (0 if place is param else place._version)
        return cls(param, place, version, place.data_ptr())

    def differs(self, other: "_Seen") -> bool:
        return (self.version, self.address) != (other.version, other.address)


class WriteRecord:
    """Of weights that no step compares with anything: their version counters and addresses after the last step."""

    def __init__(self) -> None:
        self._known: dict[Tensor, _Seen] = {}
        self._away: dict[Tensor, _Seen] = {}

    def mark(self, members: Sequence[ParamState]) -> None:
        """Makes `moved` infinite where torch has written to a weight, or moved it, since `note`."""
        for m in members:
            seen = self._known.get(m.param)
            if seen is not None and seen.differs(_Seen.of(m.param, m.place)):
                weight_changes.written(m.changes)

    def note(self, members: Sequence[ParamState], ignoring: bool) -> None:
        """ignoring: on_external_write="ignore"."""
        watched = (m for m in members if ignoring or m.kinds.master is None)
        self._known = {m.param: _Seen.of(m.param, m.place) for m in watched}

    def moved(self, params: Iterable[Tensor], away: bool) -> None:
        """These were offloaded (away), or are back with their content, at other addresses: that is no write."""
        for p in params:
            if away and p in self._known:
                self._away[p] = self._known.pop(p)
            elif not away and p in self._away:
                seen = self._away.pop(p)
                self._known[p] = _Seen.of(seen.param, seen.place)
