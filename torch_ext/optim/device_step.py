"""The step of the parameters whose state is on their own device: one adamw_flat_ call for each batch."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_ext.native import direct_call, ops
from torch_ext.optim.state import param_form
from torch_ext.optim.state.averaging import Averaging
from torch_ext.optim.state.param_state import AllGatherTarget, ParamState, named, refuse_grad
from torch_ext.optim.state.write_check import FixedMemory
from torch_ext.params.param_groups import HyperparameterTable
from torch_ext.tensors import dense

OPERATOR = "adamw_flat_"


class StepBatch(NamedTuple):
    """The parameters that one call of the operator steps."""

    rows: list[int] | None  # indices of the members; None: all of them
    weights: list[Tensor]
    slices: Tensor
    meta: Tensor
    gather: AllGatherTarget  # the bucket whose weights are all-gathered after the call
    signature: int  # of the dtypes and shapes that the weights must have
    notes: direct_call.Notes  # of this batch's calls

    def of(self, grads: list[Tensor]) -> list[Tensor]:
        return grads if self.rows is None else [grads[i] for i in self.rows]


def _batch(
    rows: list[int] | None, weights: list[Tensor], slices: Tensor, meta: Tensor, gather: AllGatherTarget = None
) -> StepBatch:
    signature, notes = param_form.signature(weights), direct_call.Notes(len(weights))
    return StepBatch(rows, weights, slices, meta, gather, signature, notes)


class DeviceStep:
    """The arguments of the adamw_flat_ calls of a step, kept from step to step."""

    def __init__(
        self,
        members: Sequence[ParamState],
        grads: Sequence[Tensor],
        gathers: Sequence[AllGatherTarget],
        order: Sequence[AllGatherTarget],
        averaging: Averaging,
    ) -> None:
        """grads, gathers: of each member. order: all gathers in their order; some may have no member here."""
        self.members = members
        self._stepped = stepped = [m.weight for m in members]
        self._averaging = averaging.decay, averaging.every
        self._counts: Tensor | None = None
        self._counters: Sequence[Tensor] = ()
        self._layouts = list(map(dense.dense_or_empty, stepped))
        self._copied = [(w, layout) for w, layout in zip(stepped, self._layouts, strict=True) if layout is not w]
        self.weights = list(map(dense.flat, self._layouts))
        stored = [m.stored() for m in members]
        self._states, slices = storages_and_slices(stored)
        self.state_memory = FixedMemory([t for row in stored for t in row if t is not None])
        meta = torch.tensor(
            [(m.id, m.local.offset, m.group) for m in members], dtype=torch.int64, device="cpu"
        ).reshape(-1, 3)
        self.batches = self._batches(slices, meta, gathers, order)
        self.record_addresses()
        # The operator checks address and strides of a parameter that it is passed itself, but not of one that it is
        # passed as a view or a copy, and no addresses in a batch whose bucket is all-gathered.
        own = [w is m.param and g is None for m, w, g in zip(members, self.weights, gathers, strict=True)]
        self.indirect = [m for m, is_own in zip(members, own, strict=True) if not is_own]
        self.weight_memory = FixedMemory([m.memory_owner for m in self.indirect])
        plain = all(w is p and g.is_contiguous() for w, p, g in zip(self.weights, stepped, grads, strict=True))
        self._check_layouts = bool(self._copied) or not plain

    def _batches(
        self, slices: Tensor, meta: Tensor, gathers: Sequence[AllGatherTarget], order: Sequence[AllGatherTarget]
    ) -> list[StepBatch]:
        """Returns a batch for each bucket that is all-gathered after its step, so that its all-gather overlaps with the
        steps of later buckets, and one for all other members."""
        self._slices, self._meta = slices, meta
        if all(gather is None for gather in order):
            return [_batch(None, self.weights, slices, meta)]
        rows: dict[AllGatherTarget, list[int]] = {gather: [] for gather in order}
        for i, gather in enumerate(gathers):
            rows[gather].append(i)
        # Parameters without an all-gather come first in `order`: their call may be rejected and retried with gradients
        # in another memory order. Once a bucket's all-gather has started, a retry would come too late.
        return [self.batch_of(chosen, gather) for gather, chosen in rows.items()]

    def batch_of(self, rows: list[int], gather: AllGatherTarget = None) -> StepBatch:
        """Returns a batch of the members with these indices. gather: see StepBatch."""
        weights = [self.weights[i] for i in rows]
        return _batch(rows, weights, self._slices[rows], self._meta[rows], gather)

    @property
    def addresses(self) -> int:
        """See `record_addresses`."""
        return self._addresses

    def record_addresses(self) -> None:
        """Records the addresses of the weights of members without an all-gather, if any member has an fp32 master. From
        now on a call with in_place=True raises if one of these weights has moved."""
        has_fp32_master = any(m.kinds.master == "master_param" for m in self.members)
        own = [batch.weights for batch in self.batches if batch.gather is None]
        self._addresses = param_form.address_signature(own[0]) if has_fp32_master and own else 0

    @property
    def takes_several_calls(self) -> bool:
        """Whether a step takes more than one call of the operator, or copies."""
        return len(self.batches) > 1 or bool(self._copied)

    @property
    def only_batch(self) -> StepBatch | None:
        """The batch that steps all members, as parameters; None if it takes more than one, or views or copies."""
        if len(self.batches) != 1 or self.batches[0].rows is not None or self.indirect:
            return None
        return self.batches[0]

    def load_copies(self) -> None:
        """Copies weights that aren't dense to the contiguous copies that are stepped in their place."""
        for weight, copy in self._copied:
            copy.copy_(weight)

    def store_copies(self) -> None:
        """Copies what was stepped back to the weights that aren't dense."""
        for weight, copy in self._copied:
            weight.copy_(copy)

    def lay_out(self, grads: list[Tensor], always: bool = False) -> list[Tensor]:
        """Returns the gradients in the memory order of their weights; unchanged if they already are. always: check each
        gradient, in this and all later steps."""
        self._check_layouts |= always
        if not self._check_layouts:
            return grads
        for member, grad in zip(self.members, grads, strict=True):
            refuse_grad(member, grad)
        return list(map(dense.in_order_of, self._layouts, grads))

    def counters(self, counts: Tensor, row: int) -> Tensor:
        """Returns a row of `OptimizerStates.counts`."""
        if counts is not self._counts:
            self._counts, self._counters = counts, counts.unbind()
        return self._counters[row]

    def in_place(self, row: int) -> bool:
        """Whether the member's weight itself is stepped, not a contiguous copy of it."""
        return self._layouts[row] is self._stepped[row]

    def lay_out_one(self, row: int, grad: Tensor) -> Tensor:
        """Returns a member's gradient in the memory order of its weight. RuntimeError where dtype or shape are not
        legal."""
        refuse_grad(self.members[row], grad)
        return dense.in_order_of(self._layouts[row], grad)

    def arguments(
        self,
        batch: StepBatch,
        grads: list[Tensor],
        hyper: HyperparameterTable,
        scalars: Sequence[Tensor],
        external: int,
        in_place: bool = False,
    ) -> tuple[Any, ...]:
        """Returns the arguments of the operator's call for one batch. grads: of the batch. scalars: grad_scale,
        clip_coef, found_inf, and two counters (see `OptimizerStates.counts`). external: tx_external_write. in_place:
        see `record_addresses`."""
        addresses = self._addresses if in_place and batch.gather is None else 0
        fixed = (self._states, batch.slices, hyper.lrs, hyper.groups, batch.meta)
        own = (*hyper.shared, external, batch.signature, *self._averaging, addresses)
        return (batch.weights, grads, *fixed, *scalars, *own)

    def run(self, batch: StepBatch, arguments: tuple[Any, ...]) -> None:
        """Calls the operator for one batch. The caller increments the parameters' version counters, after the last
        batch. RuntimeError, naming the parameter, where the operator rejects an argument: nothing is written then."""
        if not batch.weights:
            return
        try:
            ops.call_unversioned(OPERATOR, *arguments, notes=batch.notes)
        except RuntimeError as refusal:
            rows = range(len(self.members)) if batch.rows is None else batch.rows
            raise RuntimeError(named(str(refusal), [self.members[i].name for i in rows])) from None


_LEAST_COLUMNS = 6  # tensors of ParamState.stored that are always passed: all up to the checksum


def storages_and_slices(rows: list[list[Tensor | None]]) -> tuple[list[Tensor], Tensor]:
    """Returns the storages of all tensors in `rows`, each once, as flat tensors, and the slice of each (dense) tensor:
    int64 [rows, 3 * columns] with the index of its storage, its offset and its numel. Columns at the end that are empty
    in every row are left out."""
    found: list[Tensor] = []
    known: dict[tuple[int, torch.dtype], int] = {}
    slices: list[list[int]] = []
    columns = max((i + 1 for row in rows for i, t in enumerate(row) if t is not None), default=0)
    for row in (row[: max(columns, _LEAST_COLUMNS)] for row in rows):
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
    return found, torch.tensor(slices, dtype=torch.int64, device="cpu").reshape(len(rows), -1 if rows else 0)
