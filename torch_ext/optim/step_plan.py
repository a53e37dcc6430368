"""What a step needs, kept from step to step while parameters, states and their memory stay the same.

A step of a thousand small tensors is mostly Python, and torch's passing of tensors, unless there is next to nothing to
do per tensor: lists are built once, a step only compares identities, and states go as the few memories that they lie
in. Those are compared only where code outside the optimizer can have changed them (`optim/state/access.py`). Gradients
are new tensors in every step and go to the operator as they are; it validates everything before it writes, so only
where it refuses them are they checked one by one.
"""

import operator
from collections.abc import Mapping, Sequence
from itertools import chain, compress
from typing import TYPE_CHECKING, Any

from torch import Tensor

from torch_ext.optim.device_step import DeviceStep
from torch_ext.optim.state import access
from torch_ext.optim.state.param_state import AllGatherTarget, ParamState, gathers_in_order
from torch_ext.optim.state.write_check import SyncedVersion, WriteCheck
from torch_ext.params.shard_map import ShardMap

if TYPE_CHECKING:
    from torch_ext.optim.cpu_offload.host_step import HostPlan
    from torch_ext.optim.muon.matrix_step import MatrixStep
    from torch_ext.optim.optimizer_states import Settings

State = dict[Tensor, dict[str, Any]]


class StepPlan:
    """Which parameters take part in a step, on the device and on the host, and what they were when it was made."""

    def __init__(
        self,
        shards: ShardMap,
        active: list[bool],
        members: list[ParamState],
        grads: Sequence[Tensor],
        gathers: Sequence[AllGatherTarget],
        host: "HostPlan | None",
        state: State,
        synced: Mapping[Tensor, SyncedVersion],
        optimizer: "Settings",
    ) -> None:
        """shards: of all parameters. active: which of these take part. members, grads, gathers: of those. host: the
        step of those that are stepped there. state: opt.state. synced: what is known of masters."""
        self._shards, self.active, self.members, self.host = shards, active, members, host
        self.params = [m.param for m in members]
        own = [not m.host and not m.kinds.matrix for m in members]
        self._matrices = [m.kinds.matrix for m in members]
        self.gathered_late = {gather for gather, is_one in zip(gathers, self._matrices, strict=True) if is_one}
        """Buckets with matrices of Muon's: their weights are gathered when these are stepped, too."""
        self.matrices = _matrix_step(list(compress(members, self._matrices)), optimizer)
        self.device = DeviceStep(
            list(compress(members, own)),
            list(compress(grads, own)),
            list(compress(gathers, own)),
            gathers_in_order(gathers),
            optimizer.averaging,
        )
        self.writes = WriteCheck(members, synced)
        self._state, self._values = state, _values_of(state)
        self._forms = [(p.dtype, p.shape) for p in self.params]
        # Of the others the operator sees dtype and shape itself, and refuses what is not contiguous any more.
        others = (*(host.members if host is not None else ()), *compress(members, self._matrices))
        self._unseen = [m.param for m in (*self.device.viewed, *others)]
        self._unseen_forms = [(p.dtype, p.shape, p.stride()) for p in self._unseen]

    def fits(self, shards: ShardMap, active: list[bool], state: State) -> bool:
        """Whether the same parameters, state and memory take part as when the plan was made."""
        return (
            shards is self._shards
            and active == self.active
            and self.device.weight_memory.holds()
            and (not self._unseen or [(p.dtype, p.shape, p.stride()) for p in self._unseen] == self._unseen_forms)
            and (self.host is None or self.host.memory.holds())
            and (self.matrices is None or self.matrices.memory.holds())
            and (not access.exposed(state) or self._holds(state))
        )

    def _holds(self, state: State) -> bool:
        values = _values_of(state)
        same = len(values) == len(self._values) and all(map(operator.is_, values, self._values))
        return same and self.device.state_memory.holds()

    @property
    def in_parts(self) -> bool:
        """Whether a step is several calls of the library, between which it may be interrupted."""
        return self.host is not None or self.matrices is not None or self.device.in_parts

    def same_forms(self) -> bool:
        """Whether every parameter has the dtype and the shape that it had when the plan was made. A step need not ask:
        the operator does."""
        return [(p.dtype, p.shape) for p in self.params] == self._forms

    def those(self, wanted: Sequence[bool]) -> list[ParamState] | None:
        """The wanted ones among all parameters; None where some take no part."""
        if any(want and not part for want, part in zip(wanted, self.active, strict=True)):
            return None
        return list(compress(self.members, compress(wanted, self.active)))

    def on_device(self, grads: list[Tensor]) -> list[Tensor]:
        """Of all members' gradients, those that are stepped by AdamW on the device."""
        if self.host is None and self.matrices is None:
            return grads
        return [g for m, g in zip(self.members, grads, strict=True) if not m.host and not m.kinds.matrix]

    def of_matrices(self, grads: list[Tensor]) -> list[Tensor]:
        """Those that are stepped by Muon."""
        return list(compress(grads, self._matrices))

    def refuse_matrices(self, message: str) -> None:
        """RuntimeError where some are stepped by Muon."""
        if self.matrices is not None:
            raise RuntimeError(message)

    def on_host(self, grads: list[Tensor]) -> list[Tensor]:
        """The others."""
        return [g for m, g in zip(self.members, grads, strict=True) if m.host]

    def note_moved(self) -> bool:
        """Whether weights with an fp32 master lie elsewhere than they did, which `modified` then tells."""
        if not self.writes.note_moved():
            return False
        self.device.sign_addresses()
        return True

    def modified(self) -> list[ParamState]:
        """Members with an fp32 master of which weight or master may have been modified outside the optimizer since
        they were last in sync. Beside remainders the step's operator compares all weights with their checksums."""
        found = self.writes.modified(masters=access.exposed(self._state))
        if self.host is None:
            return found
        known = {id(m) for m in found}
        return found + [m for m in self.host.stale() if id(m) not in known]

    def mark_synced(self, masters: bool = False, counted: bool = False) -> None:
        """From here on masters are known to round to the weights. masters: an operator wrote to them that counts their
        versions up; steps do not. counted: since `modified` looked, each weight's version was counted up once."""
        if masters:
            self.note_moved()
        # Of weights that are stepped as views or copies, or elsewhere, other writes count, too.
        self.writes.mark_synced(masters or access.exposed(self._state), counted and not self._unseen)


def _matrix_step(members: list[ParamState], optimizer: "Settings") -> "MatrixStep | None":
    if not members:
        return None
    from torch_ext.optim.muon.matrix_step import MatrixStep

    return MatrixStep(members, optimizer)


def _values_of(state: State) -> list[Any]:
    """Everything the optimizer holds, in one list."""
    return list(chain.from_iterable(map(dict.values, access.entries(state))))
