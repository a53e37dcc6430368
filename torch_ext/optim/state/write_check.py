"""Which weights beside fp32 masters show that they were modified outside the optimizer.

Note: three signals, all of them a promise (DESIGN, Masters), and each alone sees what the others do not:
- the version counter of the parameter: whatever torch writes in place;
- its address: `p.data = other`, which counts no version up; the operator compares it, or the plan is made anew;
- its master's identity and version counter: a master that was replaced, or written, in opt.state or a state_dict.
Writes that leave none of these traces (`p.data.copy_`, numpy) change the checksums of the weights, which the step
compares itself; beside remainders these are of all weights, so that nothing is watched there. A signal leads to the
elementwise comparison (`masters.resync`).
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from torch_ext.optim.state.param_state import ParamState
from torch_ext.params.local_shard import is_dtensor
from torch_ext.tensors import dense


class FixedMemory:
    """Tensors whose addresses stand in the arguments of a step."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._addresses = list(map(Tensor.data_ptr, tensors))

    def holds(self) -> bool:
        """Whether all of them are where they were."""
        with dense.as_plain():
            return list(map(Tensor.data_ptr, self._tensors)) == self._addresses


_NEVER = -1  # a version that no tensor has


class SyncedVersion(NamedTuple):
    """A weight and its fp32 master when the master was last known to round to the weight."""

    version: int  # of the parameter
    address: int
    master: Tensor
    master_version: int

    @classmethod
    def of(cls, member: ParamState) -> "SyncedVersion":
        return cls(member.version, member.place.data_ptr(), member.master, member.master._version)

    def holds(self, member: ParamState) -> bool:
        """Whether weight and master are where they were, and neither was written."""
        now = self.of(member)
        return now.master is self.master and now == self


class WriteCheck:
    """The signals of all members of a step, on the device and on the host, that have an fp32 master."""

    def __init__(self, members: Sequence[ParamState], synced: Mapping[Tensor, SyncedVersion]) -> None:
        """synced: what is known of members; the others count as modified."""
        self._members = [m for m in members if m.kinds.master == "master_param"]
        self._params = [m.param for m in self._members]
        self._places = [m.place for m in self._members]
        self._masters = [m.master for m in self._members]
        self._has_dtensors = any(map(is_dtensor, self._params))
        self._seen: list[int] | None = None  # the versions that `modified` saw last
        self._addresses = self._addresses_now()
        self.mark_synced(masters=True)
        for i, m in enumerate(self._members):
            last = synced.get(m.param)
            if last is None or not last.holds(m):
                self._versions[i] = _NEVER

    def modified(self, masters: bool) -> list[ParamState]:
        """Members whose weight or master may have been modified since `mark_synced`. masters: somebody got at these."""
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
        """Whether weights lie elsewhere than they did, which is a signal: `modified` names them."""
        addresses, known = self._addresses_now(), self._addresses
        self._addresses = addresses
        for i, (here, there) in enumerate(zip(addresses, known, strict=True)):
            if here != there:
                self._versions[i] = _NEVER
        return addresses != known

    def mark_synced(self, masters: bool, counted: bool = False) -> None:
        """From here on the masters are known to round to the weights. masters: they may have been written by what
        counts their versions up; steps do not. counted: since `modified` looked, a step has counted each weight's
        version up, once, and nothing else of ours has any."""
        seen, self._seen = self._seen, None
        self._versions = [v + 1 for v in seen] if counted and seen is not None else self._versions_now()
        if masters:
            self._master_versions = self._master_versions_now()

    def synced(self) -> dict[Tensor, SyncedVersion]:
        """What is known, for the next plan."""
        rows = zip(self._versions, self._addresses, self._masters, self._master_versions, strict=True)
        known = zip(self._params, map(SyncedVersion._make, rows), strict=True)
        return {param: row for param, row in known if row.version >= 0}

    def _versions_now(self) -> list[int]:
        if self._has_dtensors:
            return [m.version for m in self._members]
        return [p._version for p in self._params]

    def _addresses_now(self) -> list[int]:
        return list(map(Tensor.data_ptr, self._places))

    def _master_versions_now(self) -> list[int]:
        with dense.as_plain():
            return [master._version for master in self._masters]
