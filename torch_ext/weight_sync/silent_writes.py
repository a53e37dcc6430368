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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_ext.native import adamw_args, constants, ops
from torch_ext.optim.cpu_offload.staged_args import threads
from torch_ext.optim.state import weight_changes
from torch_ext.optim.state.param_state import ParamState
from torch_ext.optim.state.write_check import FixedMemory
from torch_ext.tensors import dense
from torch_ext.weight_sync import delta_library
from torch_ext.weight_sync.delta_library import DeltaWritten

_AT_A_TIME = 1 << 20  # elements that are compared
_BLOCKS = constants.CHECKSUM // constants.BLOCK
_MARKED = slice(DeltaWritten.marked.offset // 8, None, ctypes.sizeof(DeltaWritten) // 8)  # of the words of an array


class Compared:
    """The weights with masters among those of some members. On the host one call of the library compares them all."""

    def __init__(self, members: Sequence[ParamState]) -> None:
        self._members = members
        beside = ("master_remainder", "master_param")
        found = [m for m in members if m.changes and m.kinds.master in beside and m.weight.numel()]
        self._here = [m for m in found if m.changes["moved"].is_cpu]
        self._away = [m for m in found if not m.changes["moved"].is_cpu]
        self._given = [_compared(m) for m in self._here]  # among them may be copies
        given = [t for one in self._given for t in one if t is not None]
        self._memory = FixedMemory([*(m.place for m in self._here), *given])
        rows = [DeltaWritten(*map(adamw_args.argument, given)) for given in self._given]
        self._rows = (DeltaWritten * len(rows))(*rows)

    def are(self, members: Sequence[ParamState]) -> bool:
        """Whether it was made of these, and they are where they were."""
        return members is self._members and all(m.weight.is_cpu for m in self._here) and self._memory.holds()

    def mark(self) -> list[ParamState]:
        """Makes `moved` infinite where a weight is not what the last step left. Returns those of which there are such
        weights, as far as that is known without waiting for a device."""
        if not self._here:
            return list(filter(_mark_on_device, self._away))
        delta_library.call("mark", len(self._rows), self._rows, threads())
        marked = torch.frombuffer(self._rows, dtype=torch.int64)[_MARKED].nonzero().view(-1).tolist()
        return [self._here[i] for i in marked] + list(filter(_mark_on_device, self._away))


def _compared(m: ParamState) -> list[Tensor | None]:
    """As DeltaWritten has them: weights, masters, checksums, moved."""
    if m.kinds.master == "master_param":
        return [dense.flat(m.beside), dense.flat(m.master), None, m.changes["moved"]]
    return [dense.in_order_of(m.master, m.beside), None, m.state["checksum"], m.changes["moved"]]


def _mark_on_device(m: ParamState) -> bool:
    moved = m.changes["moved"]
    if m.kinds.master == "master_remainder":
        now = torch.zeros_like(m.state["checksum"])
        none = torch.empty(0, dtype=torch.int64, device=now.device)
        weight = dense.in_order_of(m.master, m.beside)
        ops.call("master_checksum_", [weight], [dense.flat(m.master)], [now], none, constants.CHECKSUM_RENEW)
        stale = now != m.state["checksum"]
        moved.masked_fill_(stale.repeat_interleave(_BLOCKS)[: moved.numel()], torch.inf)
        return True
    weight, master = dense.flat(m.beside).view(-1), dense.flat(m.master).view(-1)
    for begin in range(0, weight.numel(), _AT_A_TIME):
        part = weight[begin : begin + _AT_A_TIME]
        rounded = master[begin : begin + _AT_A_TIME].to(weight.dtype)
        differ = (part != rounded) & ~(part.isnan() & rounded.isnan())
        _mark_blocks(moved[begin // constants.BLOCK :], differ)
    return True


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


class StoredMasters:
    """Masters, and checksums beside remainders, with their version counters: steps count none up, but who writes to
    tensors of a state_dict() does. Weights may have been written to match."""

    def __init__(self) -> None:
        self._of: Sequence[ParamState] | None = None
        self._stored: list[tuple[ParamState, Tensor]] = []
        self._versions: list[int] = []

    def note(self, members: Sequence[ParamState]) -> None:
        if self._of is not members:
            self._of, self._stored = members, _stored(members)
        self._versions = _versions(self._stored)

    def mark(self, members: Sequence[ParamState]) -> None:
        """Makes `moved` infinite where there are others than `note` saw, or these were written to."""
        if self._of is members and _versions(self._stored) == self._versions:
            return
        known = {m.param: (t, version) for (m, t), version in zip(self._stored, self._versions, strict=True)}
        now = _stored(members)
        for (m, t), version in zip(now, _versions(now), strict=True):
            before, last = known.get(m.param, (t, version))
            if before is not t or last != version:
                weight_changes.written(m.changes)


def _stored(members: Sequence[ParamState]) -> list[tuple[ParamState, Tensor]]:
    keys = {"master_param": "master_param", "master_remainder": "checksum"}
    return [(m, m.state[keys[m.kinds.master]]) for m in members if m.kinds.master]


def _versions(stored: Sequence[tuple[ParamState, Tensor]]) -> list[int]:
    with dense.as_plain():
        return [t._version for _, t in stored]


class WriteRecord:
    """Of weights that no step compares with anything: their version counters and addresses after the last step."""

    def __init__(self) -> None:
        self._masters = StoredMasters()
        self._known: dict[Tensor, _Seen] = {}
        self._away: dict[Tensor, _Seen] = {}
        self._watched: tuple[Any, list[tuple[Tensor, Tensor]]] = (None, [])  # of which members, and as _Seen has them

    def mark(self, members: Sequence[ParamState]) -> None:
        """Makes `moved` infinite where torch has written to a weight, or moved it, since `note`; or to its master."""
        self._masters.mark(members)
        for m in members if self._known else ():
            seen = self._known.get(m.param)
            if seen is not None and seen.differs(_Seen.of(m.param, m.param if seen.place is seen.param else m.place)):
                weight_changes.written(m.changes)

    def note(self, members: Sequence[ParamState], ignoring: bool) -> None:
        """ignoring: on_external_write="ignore"."""
        self._masters.note(members)
        of = (members, ignoring)
        if self._watched[0] is None or self._watched[0][0] is not members or self._watched[0][1] != ignoring:
            self._watched = of, [(m.param, m.place) for m in members if ignoring or m.kinds.master is None]
        self._known = {p: _Seen.of(p, place) for p, place in self._watched[1]}

    def moved(self, params: Iterable[Tensor], away: bool) -> None:
        """These were offloaded (away), or are back with their content, at other addresses: that is no write."""
        for p in params:
            if away and p in self._known:
                self._away[p] = self._known.pop(p)
            elif not away and p in self._away:
                seen = self._away.pop(p)
                self._known[p] = _Seen.of(seen.param, seen.place)
