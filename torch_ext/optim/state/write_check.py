"""Finds weights with fp32 masters that may have been modified outside the optimizer.

Note: three signals, all of them promised (docs/specification.md, D7). Each of them sees writes that the others miss:
- the version counter of the parameter: every in-place write by torch;
- its address: `p.data = other`, which does not increment the version counter. The operator compares addresses, or the
  plan is rebuilt;
- its master's identity and version counter: a master that was replaced or written in opt.state or a state_dict.
Writes that leave none of these traces (`p.data.copy_`, numpy) change the checksums of the weights, which the step
compares. With remainders the checksums cover all weights, so that no signal is needed. A signal leads to the
elementwise comparison (`masters.resync`).
"""

import operator
from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from torch import Tensor

from torch_ext.native import direct_call
from torch_ext.optim.state.param_state import ParamState
from torch_ext.params.local_shard import is_dtensor
from torch_ext.tensors import dense


class FixedMemory:
    """The addresses of tensors on which the kept arguments of a step depend."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._addresses = list(map(Tensor.data_ptr, tensors))

    def unchanged(self) -> bool:
        """Whether all addresses are unchanged."""
        if not self._tensors:
            return True
        with dense.as_plain():
            return list(map(Tensor.data_ptr, self._tensors)) == self._addresses


_NEVER = -(1 << 62)  # a version that no tensor has


class SyncedVersion(NamedTuple):
    """Version counters and memory of a weight and its fp32 master when the master was last known to round to it."""

    version: int  # of the parameter
    address: int
    master: Tensor
    master_version: int

    @classmethod
    def of(cls, member: ParamState) -> "SyncedVersion":
        return cls(member.version, member.memory_owner.data_ptr(), member.master, member.master._version)

    def holds(self, member: ParamState) -> bool:
        """Whether weight and master have the same memory, and neither was written since."""
        now = self.of(member)
        return now.master is self.master and now == self


Versions: TypeAlias = "array[int]"


class WriteCheck:
    """Compares the signals of all members of a step that have an fp32 master, on the device and on the host."""

    def __init__(self, members: Sequence[ParamState], synced: Mapping[Tensor, SyncedVersion]) -> None:
        """synced: members whose masters are known to round to their weights; all others count as modified."""
        self._members = [m for m in members if m.kinds.master == "master_param"]
        self._params = [m.param for m in self._members]
        self._memory_owners = [m.memory_owner for m in self._members]
        self._masters = [m.master for m in self._members]
        self._has_dtensors = any(map(is_dtensor, self._params))
        self._own = 0  # how often a step incremented every weight's version counter; subtracted from all versions here
        self._seen: Versions | None = None  # what `modified` saw last
        self._addresses = self._addresses_now()
        self.mark_synced(masters=True)
        for i, m in enumerate(self._members):
            last = synced.get(m.param)
            if last is None or not last.holds(m):
                self._versions[i] = _NEVER

    def modified(self, masters: bool) -> list[ParamState]:
        """Returns the members whose weight or master may have been modified since `mark_synced`. masters: compare their
        version counters, too, because code outside the optimizer may write to them."""
        self._seen = versions = self._versions_now()
        master_versions = self._master_versions_now() if masters else self._master_versions
        if (versions, master_versions) == (self._versions, self._master_versions):
            return []
        now, known = (
            zip(versions, master_versions, strict=True),
            zip(self._versions, self._master_versions, strict=True),
        )
        return [member for member, here, there in zip(self._members, now, known, strict=True) if here != there]

    def note_moved(self) -> bool:
        """Whether weights have moved to other addresses, which is a signal: `modified` then lists them."""
        addresses, known = self._addresses_now(), self._addresses
        self._addresses = addresses
        for i, (here, there) in enumerate(zip(addresses, known, strict=True)):
            if here != there:
                self._versions[i] = _NEVER
        return addresses != known

    def mark_synced(self, masters: bool, counted: bool = False) -> None:
        """Records that masters round to their weights now. masters: their version counters may have been incremented (a
        step does not). counted: since the last call of `modified`, a step has incremented each weight's version counter
        once, and nothing else in the optimizer has incremented one."""
        seen, self._seen = self._seen, None
        if counted and seen is not None:
            self._own += 1
            self._versions = seen
        else:
            self._versions = self._versions_now()
        if masters:
            self._master_versions = self._master_versions_now()

    def covers(self, params: Sequence[Tensor]) -> bool:
        """Whether all of these parameters, or none of them, have an fp32 master, and none of those is a DTensor."""
        if self._params and (len(params) != len(self._params) or self._has_dtensors):
            return False
        return all(map(operator.is_, params, self._params))

    @property
    def expected(self) -> "tuple[array[int] | None, int]":
        """The version counters that the parameters with fp32 masters have unless they were written outside the
        optimizer: an array, and what is to be added to each. (None, 0) if there are none."""
        return (self._versions, self._own) if self._params else (None, 0)

    def masters_unchanged(self) -> bool:
        """Whether the version counters of all masters are as `mark_synced` found them."""
        return not self._masters or self._master_versions_now() == self._master_versions

    def mark_repeated(self) -> None:
        """Records that masters round to their weights after a step that found all versions as `expected`, and has
        incremented each of them once."""
        self._own += 1

    def synced(self) -> dict[Tensor, SyncedVersion]:
        """Returns the record of members in sync, for the next plan."""
        versions = [version + self._own for version in self._versions]
        rows = zip(versions, self._addresses, self._masters, self._master_versions, strict=True)
        known = zip(self._params, map(SyncedVersion._make, rows), strict=True)
        return {param: row for param, row in known if row.version >= 0}

    def _versions_now(self) -> Versions:
        if self._has_dtensors:
            return array("q", [m.version - self._own for m in self._members])
        return direct_call.versions(self._params, self._own)

    def _addresses_now(self) -> list[int]:
        return list(map(Tensor.data_ptr, self._memory_owners))

    def _master_versions_now(self) -> Versions:
        with dense.as_plain():
            return direct_call.versions(self._masters, 0)
