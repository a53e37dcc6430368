"""The arguments of one adamw_flat_ call, kept from step to step while what they were made of stays the same.

A step of a thousand small tensors is mostly Python, and torch's handing over of tensors, unless there is next to
nothing to do per tensor: lists are built once, a step only compares identities, and states go as the few memories that
they lie in. Those are looked at only where somebody else can have changed them (`optim/state/access.py`). Gradients are
new tensors in every step and go to the operator unseen; it validates everything before it writes, so only where it
refuses them are they looked at one by one.
"""

import operator
from collections.abc import Mapping, Sequence
from itertools import chain, compress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from torch_ext.native import ops
from torch_ext.optim.state import access, param_form
from torch_ext.optim.state.masters import SyncedVersion
from torch_ext.optim.state.param_state import AllGatherTarget, ParamState, refuse_grad
from torch_ext.params.local_shard import is_dtensor
from torch_ext.params.param_groups import HyperparameterTable
from torch_ext.tensors import dense

if TYPE_CHECKING:
    from torch_ext.optim.cpu_offload.host_step import HostPlan


def values_of(state: dict[Tensor, dict[str, Any]]) -> list[Any]:
    """Everything the optimizer holds, in one list."""
    return list(chain.from_iterable(map(dict.values, access.entries(state))))


def memories(rows: list[list[Tensor | None]]) -> tuple[list[Tensor], Tensor]:
    """Whole memories, each once, and where in them the (dense) tensors of each row lie: int64 [rows, 3 each]."""
    found: list[Tensor] = []
    known: dict[tuple[int, torch.dtype], int] = {}
    slices: list[list[int]] = []
    for row in rows:
        slices.append([])
        for t in row:
            if t is None or t.numel() == 0:
                slices[-1] += (0, 0, 0)
                continue
            storage = t.untyped_storage()
            index = known.setdefault((storage.data_ptr(), t.dtype), len(found))
            if index == len(found):
                found.append(t.detach().as_strided((storage.nbytes() // t.element_size(),), (1,), 0))
            slices[-1] += (index, int(t.storage_offset()), t.numel())
    return found, torch.tensor(slices, dtype=torch.int64).reshape(len(rows), -1 if rows else 0)


class StepBatch(NamedTuple):
    """What one call of the operator steps."""

    rows: list[int] | None  # which members; None: all of them
    weights: list[Tensor]
    slices: Tensor
    meta: Tensor
    gather: AllGatherTarget  # the bucket whose weights travel afterwards
    signature: int  # of the weights, as they are to be

    def of(self, grads: list[Tensor]) -> list[Tensor]:
        return grads if self.rows is None else [grads[i] for i in self.rows]


def _chunks(plan: "StepPlan", gathers: Sequence[AllGatherTarget], order: Sequence[AllGatherTarget]) -> list[StepBatch]:
    """One for each bucket that is gathered after its step, so that gathers overlap with the steps of later ones."""
    if all(gather is None for gather in order):
        return [StepBatch(None, plan.weights, plan.slices, plan.meta, None, param_form.signature(plan.weights))]
    rows: dict[AllGatherTarget, list[int]] = {gather: [] for gather in order}
    for i, gather in enumerate(gathers):
        rows[gather].append(i)
    # What nobody gathers comes first: it may be refused and stepped again when it has been laid out anew, which is too
    # late once a bucket is on its way.
    weights = {gather: [plan.weights[i] for i in chosen] for gather, chosen in rows.items()}
    return [
        StepBatch(
            chosen,
            weights[gather],
            plan.slices[chosen],
            plan.meta[chosen],
            gather,
            param_form.signature(weights[gather]),
        )
        for gather, chosen in rows.items()
    ]


class StepPlan:
    def __init__(
        self,
        members: list[ParamState],
        everyone: list[Tensor],
        active: list[bool],
        state: dict[Tensor, dict[str, Any]],
        grads: list[Tensor],
        seen: Mapping[Tensor, SyncedVersion],
        gathers: Sequence[AllGatherTarget],
        order: Sequence[AllGatherTarget],
    ) -> None:
        """grads, gathers: of the members. order: of all gathers, some of which may have no member here."""
        self.members = members
        self._everyone = everyone
        self._active = active
        self._state = state
        self._values = values_of(state)

        self.everybody = members
        self.host: HostPlan | None = None
        self.params = [m.param for m in members]
        stepped = [m.weight for m in members]
        # A weight that isn't dense is stepped as a contiguous copy. What gradients and state are laid out like:
        self._orders = [
            w if dense.is_dense(w) else torch.empty_like(w, memory_format=torch.contiguous_format) for w in stepped
        ]
        self._copied = [(w, order) for w, order in zip(stepped, self._orders, strict=True) if order is not w]
        self.weights = [dense.flat(order) for order in self._orders]
        at_rest = [m.at_rest() for m in members]
        self.states, self.slices = memories(at_rest)
        self._held = [t for row in at_rest for t in row if t is not None]
        self._places = list(map(Tensor.data_ptr, self._held))  # the operator no longer sees where a state moved to
        self.meta = torch.tensor([[m.id, m.local.start, m.group] for m in members], dtype=torch.int64).reshape(-1, 3)
        self.chunks = _chunks(self, gathers, order)
        self._look_at_forms(members)

        # A write by somebody else shows in these two. A weight that is passed as a view of its own must stay where it
        # is.
        self._watched = [i for i, m in enumerate(members) if m.kinds.master or self.weights[i] is not m.param]
        self._watched_params = [self.params[i] for i in self._watched]
        self._places_watched = [members[i].place for i in self._watched]
        self._wrapped = any(map(is_dtensor, self._watched_params))
        self._addresses = [t.data_ptr() for t in self._places_watched]
        self._versions = [
            self._known_version(i, address, seen) for i, address in zip(self._watched, self._addresses, strict=True)
        ]
        self._masters = [m.master if m.kinds.master else dense.NONE for m in map(members.__getitem__, self._watched)]
        self._master_versions = self._master_versions_now()

        self._look_at_grads = bool(self._copied) or not all(
            w is p and g.is_contiguous() for w, p, g in zip(self.weights, stepped, grads, strict=True)
        )

    def _known_version(self, i: int, address: int, seen: Mapping[Tensor, SyncedVersion]) -> int:
        """The version at which the weight was last seen, or -1, which no tensor has."""
        member = self.members[i]
        last = seen.get(member.param)
        if last is None or member.kinds.master is None:
            return -1
        return last.version if last.fits(member, address) else -1

    def those(self, wanted: Sequence[bool]) -> list[ParamState] | None:
        """The wanted ones among all parameters; None where some take no part."""
        if any(want and not part for want, part in zip(wanted, self._active, strict=True)):
            return None
        return list(compress(self.everybody, compress(wanted, self._active)))

    def share(self, everybody: list[ParamState], host: "HostPlan | None") -> None:
        """Some of the members of a step are stepped on the host."""
        self.everybody, self.host = everybody, host
        self.params = [m.param for m in everybody]
        self._look_at_forms(everybody)

    def _look_at_forms(self, members: Sequence[ParamState]) -> None:
        self._forms = [(p.dtype, p.shape) for p in self.params]
        # Of the others the operator sees dtype and shape itself, and refuses what is not contiguous any more.
        own = {id(m.param) for m, weight in zip(self.members, self.weights, strict=True) if weight is m.param}
        self._unseen = [m.param for m in members if id(m.param) not in own]
        self._unseen_forms = [(p.dtype, p.shape, p.stride()) for p in self._unseen]

    def same_forms(self) -> bool:
        """Whether every parameter has the dtype and the shape that it had when the plan was made. A step need not ask:
        the operator does."""
        return [(p.dtype, p.shape) for p in self.params] == self._forms

    def own(self, grads: list[Tensor]) -> list[Tensor]:
        """Of everybody's, those that are stepped here."""
        return grads if self.host is None else [g for m, g in zip(self.everybody, grads, strict=True) if not m.host]

    def theirs(self, grads: list[Tensor]) -> list[Tensor]:
        """Those that are stepped on the host."""
        return [g for m, g in zip(self.everybody, grads, strict=True) if m.host]

    @property
    def active(self) -> list[bool]:
        """Which of all parameters take part."""
        return self._active

    def fits(self, everyone: list[Tensor], active: list[bool], state: dict[Tensor, dict[str, Any]]) -> bool:
        """Whether the same parameters, state and memory take part as when the plan was made."""
        return (
            len(everyone) == len(self._everyone)
            and active == self._active
            and all(map(operator.is_, everyone, self._everyone))
            and list(map(Tensor.data_ptr, self._places_watched)) == self._addresses
            and (not self._unseen or [(p.dtype, p.shape, p.stride()) for p in self._unseen] == self._unseen_forms)
            and (self.host is None or self.host.fits())
            and (self._state is state and not access.handed_out(state) or self._holds(state))
        )

    def _holds(self, state: dict[Tensor, dict[str, Any]]) -> bool:
        values = values_of(state)
        with dense.as_plain():
            return (
                len(values) == len(self._values)
                and all(map(operator.is_, values, self._values))
                and list(map(Tensor.data_ptr, self._held)) == self._places
            )

    def suspects(self) -> list[ParamState]:
        """Members of which somebody else may have written to the weight or the fp32 master since they were last seen.
        Remainders have checksums, which the step itself compares."""
        versions, masters = self._versions_now(), self._master_versions
        if access.handed_out(self._state):  # else nobody wrote to a master
            masters = self._master_versions_now()
        if versions == self._versions and masters == self._master_versions:
            return []
        now, last = zip(versions, masters, strict=True), zip(self._versions, self._master_versions, strict=True)
        return [
            self.members[i]
            for i, here, there in zip(self._watched, now, last, strict=True)
            if here != there and self.members[i].kinds.master == "master_param"
        ]

    def look(self, wrote_masters: bool = False) -> None:
        """From here on the weights are known to be what their masters round to. wrote_masters: by an operator that
        counts up; steps do not."""
        self._versions = self._versions_now()
        if wrote_masters or access.handed_out(self._state):
            self._master_versions = self._master_versions_now()
        if self.host is not None:
            self.host.look()

    def _versions_now(self) -> list[int]:
        if self._wrapped:
            return [self.members[i].version for i in self._watched]
        return [p._version for p in self._watched_params]

    def _master_versions_now(self) -> list[int]:
        with dense.as_plain():
            return [master._version for master in self._masters]

    def seen(self) -> dict[Tensor, SyncedVersion]:
        record = {}
        places = zip(self._addresses, self._masters, self._master_versions, strict=True)
        for i, version, (address, master, written) in zip(self._watched, self._versions, places, strict=True):
            member = self.members[i]
            if member.kinds.master and version >= 0:
                record[member.param] = SyncedVersion(version, address, master, written)
        return record if self.host is None else record | self.host.seen()

    def load_copies(self) -> None:
        for param, scratch in self._copied:
            scratch.copy_(param)

    def store_copies(self) -> None:
        for param, scratch in self._copied:
            param.copy_(scratch)

    def lay_out(self, grads: list[Tensor], always: bool = False) -> list[Tensor]:
        """The gradients in the memory order of what they step; themselves where all of them are in it already."""
        self._look_at_grads |= always
        if not self._look_at_grads:
            return grads
        return [self._laid_out(i, g) for i, g in enumerate(grads)]

    def _laid_out(self, i: int, grad: Tensor) -> Tensor:
        member = self.members[i]
        refuse_grad(member, grad)
        return dense.in_order_of(self._orders[i], grad)


def run(
    plan: StepPlan,
    chunk: StepBatch,
    grads: list[Tensor],
    hyper: HyperparameterTable,
    scalars: Sequence[Tensor],
    external: int,
) -> None:
    """The operator. grads: of the chunk. scalars: grad_scale, clip_coef, found_inf, and two counters (see
    `GradScaling._counts`). external: tx_external_write. Counts no version up: the caller does, of the parameters, when
    the last chunk was stepped."""
    if not chunk.weights:
        return
    arguments = (
        plan.states,
        chunk.slices,
        hyper.lrs,
        hyper.groups,
        chunk.meta,
        *scalars,
        *hyper.shared,
        external,
        chunk.signature,
    )
    ops.look("adamw_flat_", chunk.weights, grads, *arguments)
