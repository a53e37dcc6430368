"""What a step needs, kept from step to step while parameters, states and their memory stay the same.

A step of a thousand small tensors would spend most of its time in Python and in passing tensors to torch. So there is
next to no work per tensor: argument lists are built once, a step only compares identities, and states are passed as the
few storages that hold them. States are compared only where code outside the optimizer can have changed them
(`optim/state/access.py`). Gradients are new tensors in every step and are passed unchecked: the operator validates
everything before it writes, and only if it rejects the call are they checked one by one.
"""

import operator
from collections.abc import Mapping, Sequence
from itertools import chain, compress
from typing import TYPE_CHECKING, Any

from torch import Tensor

from torch_ext.optim.device_step import DeviceStep, StepBatch
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
    """The parameters that take part in a step, on the device and on the host, with the dtypes, shapes and memory that
    they had when the plan was made."""

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
        """shards, active: of all parameters; active says which take part. members, grads, gathers: of the parameters
        that take part. host: the step of the members whose state is there. state: opt.state. synced: masters that are
        known to round to their weights."""
        self._shards, self.active, self.members, self.host = shards, active, members, host
        self.params = [m.param for m in members]
        own = [not m.host and not m.kinds.matrix for m in members]
        self._matrices = [m.kinds.matrix for m in members]
        self.gathered_late = {gather for gather, is_matrix in zip(gathers, self._matrices, strict=True) if is_matrix}
        """Buckets that hold Muon's matrices: all-gathered only after the matrices are stepped, too."""
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
        # The AdamW operator is not passed these parameters themselves, so `fits` compares their dtypes and shapes. Of
        # all other parameters the operator checks both, and rejects one that is not contiguous any more.
        others = (*(host.members if host is not None else ()), *compress(members, self._matrices))
        self._indirect_params = [m.param for m in (*self.device.indirect, *others)]
        self._indirect_forms = [(p.dtype, p.shape, p.stride()) for p in self._indirect_params]

    def fits(self, shards: ShardMap, active: list[bool], state: State) -> bool:
        """Whether the same parameters, state and memory take part as when the plan was made."""
        return (
            shards is self._shards
            and active == self.active
            and self.device.weight_memory.unchanged()
            and (
                not self._indirect_params
                or [(p.dtype, p.shape, p.stride()) for p in self._indirect_params] == self._indirect_forms
            )
            and (self.host is None or self.host.memory.unchanged())
            and (self.matrices is None or self.matrices.memory.unchanged())
            and (not access.exposed(state) or self._holds(state))
        )

    def same_states(self, state: State) -> bool:
        """Whether states and masters are as they were after the last step, as far as code outside the optimizer may
        have changed them."""
        return not access.lent(state) or (
            (not access.exposed(state) or self._holds(state)) and self.writes.masters_unchanged()
        )

    def _holds(self, state: State) -> bool:
        values = _values_of(state)
        same = len(values) == len(self._values) and all(map(operator.is_, values, self._values))
        return same and self.device.state_memory.unchanged()

    @property
    def only_batch(self) -> StepBatch | None:
        """The batch that steps all of the optimizer's parameters in one call of the operator; None if a step takes more
        than that, or some parameters have no gradient (see `DeviceStep.only_batch`)."""
        one_call = self.host is None and self.matrices is None and all(self.active)
        return self.device.only_batch if one_call else None

    @property
    def takes_several_calls(self) -> bool:
        """Whether a step takes several calls of the library, between which it may be interrupted."""
        return self.host is not None or self.matrices is not None or self.device.takes_several_calls

    @property
    def gathers_weights(self) -> bool:
        """Whether a step all-gathers weights at its end."""
        return bool(self.gathered_late) or any(batch.gather is not None for batch in self.device.batches)

    def same_forms(self) -> bool:
        """Whether every parameter has the dtype and the shape that it had when the plan was made. step() need not call
        this: the operator checks it."""
        return [(p.dtype, p.shape) for p in self.params] == self._forms

    def selected_members(self, wanted: Sequence[bool]) -> list[ParamState] | None:
        """Returns the members that are wanted; None where a wanted parameter takes no part. wanted: a flag for each
        parameter of the optimizer."""
        if any(want and not part for want, part in zip(wanted, self.active, strict=True)):
            return None
        return list(compress(self.members, compress(wanted, self.active)))

    def on_device(self, grads: list[Tensor]) -> list[Tensor]:
        """Returns the gradients of the members that AdamW steps on the device. grads: of all members."""
        if self.host is None and self.matrices is None:
            return grads
        return [g for m, g in zip(self.members, grads, strict=True) if not m.host and not m.kinds.matrix]

    def of_matrices(self, grads: list[Tensor]) -> list[Tensor]:
        """Returns the gradients of the members that Muon steps. grads: of all members."""
        return list(compress(grads, self._matrices))

    def refuse_matrices(self, message: str) -> None:
        """Raises RuntimeError where Muon steps some of the members."""
        if self.matrices is not None:
            raise RuntimeError(message)

    def on_host(self, grads: list[Tensor]) -> list[Tensor]:
        """Returns the gradients of the members that are stepped on the host. grads: of all members."""
        return [g for m, g in zip(self.members, grads, strict=True) if m.host]

    def note_moved(self) -> bool:
        """Whether a weight with an fp32 master has moved to another address. From then on `modified` lists it, and
        steps expect the current addresses."""
        if not self.writes.note_moved():
            return False
        self.device.record_addresses()
        return True

    def modified(self) -> list[ParamState]:
        """Returns the members with an fp32 master whose weight or master may have been modified outside the optimizer
        since the two were last in sync. Weights with a remainder are not among them: the step's operator compares all
        of their elements with checksums."""
        found = self.writes.modified(masters=access.lent(self._state))
        if self.host is None:
            return found
        known = {id(m) for m in found}
        return found + [m for m in self.host.stale() if id(m) not in known]

    def mark_synced(self, masters: bool = False, counted: bool = False) -> None:
        """Records that masters round to their weights now. masters: an operator that increments the masters' version
        counters wrote to them; a step does not. counted: since the last call of `modified` each weight's version
        counter was incremented exactly once."""
        if masters:
            self.note_moved()
        # The version counters of weights that are stepped as views or copies, or elsewhere, are incremented more often.
        self.writes.mark_synced(masters or access.lent(self._state), counted and not self._indirect_params)


def _matrix_step(members: list[ParamState], optimizer: "Settings") -> "MatrixStep | None":
    if not members:
        return None
    from torch_ext.optim.muon.matrix_step import MatrixStep

    return MatrixStep(members, optimizer)


def _values_of(state: State) -> list[Any]:
    """Returns all values in opt.state, in one list."""
    return list(chain.from_iterable(map(dict.values, access.entries(state))))
