"""Finds weights that were written outside of steps since the last step, and sets `moved` of their blocks to infinity.

Note: a step records which weights it changes, but other code may write to weights, too. How such a write shows depends
on the weight's state. With remainders, the step left checksums of all weights. With an fp32 master, the weight must be
the master rounded. A weight without a master has its version counter and address, which show torch's writes. All this
is compared before a delta is encoded. Blocks with such a write are marked again afterwards, for the next version: if
the next step does not notice the write, it overwrites the weight with the rounded master, without recording that this
changes what was published. Blocks in which no step changed a bit need none of this: they are compared with the
checksums of the published weights.
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

_AT_A_TIME = 1 << 20  # elements to compare at a time on a device
_BLOCKS = constants.CHECKSUM // constants.BLOCK  # blocks of `moved` in a checksum block
# Where the fields `marked` are in an array of DeltaWritten, in 8-byte words.
_MARKED = slice(DeltaWritten.marked.offset // 8, None, ctypes.sizeof(DeltaWritten) // 8)


class MasterComparison:
    """Compares the weights of members with their fp32 masters or, for remainders, with the checksums that the step
    left. On the host, one library call compares all of them."""

    def __init__(self, members: Sequence[ParamState]) -> None:
        self._members = members
        beside = ("master_remainder", "master_param")
        found = [m for m in members if m.changes and m.kinds.master in beside and m.weight.numel()]
        self._in_host_memory = [m for m in found if m.changes["moved"].is_cpu]
        self._on_device = [m for m in found if not m.changes["moved"].is_cpu]
        self._given = [_compared(m) for m in self._in_host_memory]  # keeps copies among these tensors alive
        given = [t for one in self._given for t in one if t is not None]
        self._memory = FixedMemory([*(m.memory_owner for m in self._in_host_memory), *given])
        rows = [DeltaWritten(*map(adamw_args.argument, given)) for given in self._given]
        self._rows = (DeltaWritten * len(rows))(*rows)

    def fits(self, members: Sequence[ParamState]) -> bool:
        """Whether this object can compare these members: it was created for them, their memory has not moved, and it
        holds no host copy of a weight on a device, which would be out of date."""
        on_host = all(m.weight.is_cpu for m in self._in_host_memory)
        return members is self._members and on_host and self._memory.unchanged()

    def mark(self) -> list[ParamState]:
        """Sets `moved` to infinity for blocks in which a weight is not what the last step left. Returns the members
        with such blocks. Members on a device are always returned: to know would mean to wait for the device."""
        if not self._in_host_memory:
            return list(filter(_mark_on_device, self._on_device))
        delta_library.call("mark", len(self._rows), self._rows, threads())
        marked = torch.frombuffer(self._rows, dtype=torch.int64)[_MARKED].nonzero().view(-1).tolist()
        return [self._in_host_memory[i] for i in marked] + list(filter(_mark_on_device, self._on_device))


def _compared(m: ParamState) -> list[Tensor | None]:
    """Returns the tensors of a DeltaWritten: weights, masters, checksums, moved."""
    if m.kinds.master == "master_param":
        return [dense.flat(m.weight_on_state_device), dense.flat(m.master), None, m.changes["moved"]]
    return [dense.in_order_of(m.master, m.weight_on_state_device), None, m.state["checksum"], m.changes["moved"]]


def _mark_on_device(m: ParamState) -> bool:
    """Does what tx_delta_mark does, for a member on a device. Returns True."""
    moved = m.changes["moved"]
    if m.kinds.master == "master_remainder":
        now = torch.zeros_like(m.state["checksum"])
        none = torch.empty(0, dtype=torch.int64, device=now.device)
        weight = dense.in_order_of(m.master, m.weight_on_state_device)
        ops.call("master_checksum_", [weight], [dense.flat(m.master)], [now], none, constants.CHECKSUM_RENEW)
        stale = now != m.state["checksum"]
        moved.masked_fill_(stale.repeat_interleave(_BLOCKS)[: moved.numel()], torch.inf)
        return True
    weight, master = dense.flat(m.weight_on_state_device).view(-1), dense.flat(m.master).view(-1)
    for begin in range(0, weight.numel(), _AT_A_TIME):
        part = weight[begin : begin + _AT_A_TIME]
        rounded = master[begin : begin + _AT_A_TIME].to(weight.dtype)
        differ = (part != rounded) & ~(part.isnan() & rounded.isnan())
        _mark_blocks(moved[begin // constants.BLOCK :], differ)
    return True


def _mark_blocks(moved: Tensor, differ: Tensor) -> None:
    """Sets `moved` to infinity for the blocks of 128 in which an element differs."""
    whole = differ.numel() // constants.BLOCK
    of_block = differ[: whole * constants.BLOCK].view(whole, constants.BLOCK).any(1)
    moved[:whole].masked_fill_(of_block, torch.inf)
    moved[whole : whole + 1].masked_fill_(differ[whole * constants.BLOCK :].any(), torch.inf)


class _WeightSnapshot(NamedTuple):
    """A weight's version counter and address at a time when all writes to it were known."""

    param: Tensor
    memory_owner: Tensor
    """`ParamState.memory_owner`."""
    version: int
    address: int

    @classmethod
    def of(cls, param: Tensor, memory_owner: Tensor) -> "_WeightSnapshot":
        version = param._version + (0 if memory_owner is param else memory_owner._version)
        return cls(param, memory_owner, version, memory_owner.data_ptr())

    def differs(self, other: "_WeightSnapshot") -> bool:
        return (self.version, self.address) != (other.version, other.address)


class StoredMasters:
    """Finds writes to fp32 masters, and to the checksums that go with remainders, by their version counters. Steps do
    not increment these, but code that writes to the tensors of a state_dict() does. Such code may have written the
    weights to match, so that a comparison of weights and masters shows nothing."""

    def __init__(self) -> None:
        self._noted_members: Sequence[ParamState] | None = None
        self._stored: list[tuple[ParamState, Tensor]] = []
        self._versions: list[int] = []

    def note(self, members: Sequence[ParamState]) -> None:
        """Stores the current version counters."""
        if self._noted_members is not members:
            self._noted_members, self._stored = members, _stored(members)
        self._versions = _versions(self._stored)

    def mark(self, members: Sequence[ParamState]) -> None:
        """Sets `moved` to infinity for members whose tensor was replaced or written since `note`."""
        if self._noted_members is members and _versions(self._stored) == self._versions:
            return
        known = {m.param: (t, version) for (m, t), version in zip(self._stored, self._versions, strict=True)}
        now = _stored(members)
        for (m, t), version in zip(now, _versions(now), strict=True):
            before, last = known.get(m.param, (t, version))
            if before is not t or last != version:
                weight_changes.mark_written(m.changes)


def _stored(members: Sequence[ParamState]) -> list[tuple[ParamState, Tensor]]:
    """Returns each member that has a master, with that master, or with the checksums if it is a remainder."""
    keys = {"master_param": "master_param", "master_remainder": "checksum"}
    return [(m, m.state[keys[m.kinds.master]]) for m in members if m.kinds.master]


def _versions(stored: Sequence[tuple[ParamState, Tensor]]) -> list[int]:
    with dense.as_plain():
        return [t._version for _, t in stored]


class WriteRecord:
    """Version counters and addresses after the last step, of weights that are compared with nothing else. Also tracks
    writes to masters (`StoredMasters`)."""

    def __init__(self) -> None:
        self._masters = StoredMasters()
        self._last_seen: dict[Tensor, _WeightSnapshot] = {}
        self._offloaded: dict[Tensor, _WeightSnapshot] = {}  # offloaded weights
        # Arguments of `note`, and the resulting (param, memory_owner) of each weight to watch.
        self._watched: tuple[Any, list[tuple[Tensor, Tensor]]] = (None, [])

    def mark(self, members: Sequence[ParamState]) -> None:
        """Sets `moved` to infinity if, since `note`, torch has written to a weight or its master, or moved the
        weight."""
        self._masters.mark(members)
        for m in members if self._last_seen else ():
            seen = self._last_seen.get(m.param)
            if seen is not None and seen.differs(
                _WeightSnapshot.of(m.param, m.param if seen.memory_owner is seen.param else m.memory_owner)
            ):
                weight_changes.mark_written(m.changes)

    def note(self, members: Sequence[ParamState], ignoring: bool) -> None:
        """Stores the current version counters and addresses. ignoring: whether on_external_write="ignore". Steps then
        compare nothing, so weights with masters are watched here, too."""
        self._masters.note(members)
        of = (members, ignoring)
        if self._watched[0] is None or self._watched[0][0] is not members or self._watched[0][1] != ignoring:
            self._watched = of, [(m.param, m.memory_owner) for m in members if ignoring or m.kinds.master is None]
        self._last_seen = {p: _WeightSnapshot.of(p, memory_owner) for p, memory_owner in self._watched[1]}

    def moved(self, params: Iterable[Tensor], offloaded: bool) -> None:
        """Notes that weights were offloaded, or else are back with their content. The new address is no write."""
        for p in params:
            if offloaded and p in self._last_seen:
                self._offloaded[p] = self._last_seen.pop(p)
            elif not offloaded and p in self._offloaded:
                seen = self._offloaded.pop(p)
                self._last_seen[p] = _WeightSnapshot.of(seen.param, seen.memory_owner)
