"""The step of matrices of which this rank has all elements: alone, or replicated over ranks (no_shard).

Replicated matrices have the same gradients on all ranks. Each rank updates momentum and weights itself; only the
products are divided: each matrix's owner broadcasts the update. All ranks start the broadcasts in the same order, an
owner as soon as the update is computed, so that updates are sent while later products are computed.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_ext.comm import group_calls
from torch_ext.optim.muon.matrix_calls import MatrixCall, calls_of
from torch_ext.optim.muon.matrix_member import MatrixMember, Part, StepScalars
from torch_ext.optim.muon.newton_schulz import NON_FINITE, NonFiniteProducts
from torch_ext.optim.muon.owners import Owners
from torch_ext.optim.muon.products import Products
from torch_ext.optim.step_progress import NotStepped


def step_alone(grads: dict[MatrixMember, Tensor], products: Products, scalars: StepScalars) -> None:
    """Updates parameters that no other rank shares. If products are not finite, or could not be computed, raises
    RuntimeError naming the first such parameter; all other parameters are updated."""
    failed: dict[MatrixMember, Exception] = {}
    for window in products.windows(list(grads)):
        updates = dict(window)
        calls = calls_of(updates)
        for call in calls:
            call.momentum([grads[m] for m in call.members], scalars, [updates[m] for m in call.members])
        parts = (_part(member, i, update) for member, update in window for i in range(len(member.matrices)))
        for part, failure in products.orthogonalise(parts, window=True):
            if failure is not None:
                failed.setdefault(part.member, failure)
        for call in calls_of(m for m in updates if m not in failed) if failed else calls:
            call.update([updates[m] for m in call.members], scalars)
    for member in grads:
        if member in failed:
            raise failure_of(member, failed[member])


def failure_of(member: MatrixMember, error: Exception) -> NotStepped:
    """Returns the exception to raise for a parameter that was not updated."""
    kind = NonFiniteProducts if isinstance(error, NonFiniteProducts) else NotStepped
    return kind(f"{member.name}: {error}; its weights are as they were, and other parameters are stepped")


def _part(member: MatrixMember, i: int, momentum: Tensor) -> Part:
    m = member.matrices[i]
    return Part(member, m, momentum[m.begin : m.begin + m.numel])


class _Broadcasts:
    """A parameter whose updates are being broadcast."""

    def __init__(self, member: MatrixMember, update: Tensor, calls: Sequence[group_calls.Call]) -> None:
        self.member, self._update, self._calls = member, update, calls

    def finish(self, scalars: StepScalars) -> None:
        """Waits for the updates and applies them to the weights. Raises if an owner marked one as failed (NaN)."""
        for call in self._calls:
            call.wait()
        firsts = torch.stack([self._update[m.begin] for m in self.member.matrices])
        if bool(firsts.isnan().any()):
            raise failure_of(self.member, NonFiniteProducts(NON_FINITE))
        MatrixCall([self.member]).update([self._update], scalars)


class Replicated(NamedTuple):
    """A parameter that all ranks of a group have completely."""

    member: MatrixMember
    grad: Tensor
    owners: Owners
    first: int  # index of its first matrix in `owners`

    def owns(self, matrix: int) -> bool:
        return self.owners.of[self.first + matrix] == self.owners.rank


class ReplicatedRun:
    """One step of replicated matrices."""

    def __init__(self, products: Products, scalars: StepScalars) -> None:
        self._products, self._scalars = products, scalars
        self._updates: dict[MatrixMember, Tensor] = {}
        self._members: list[MatrixMember] = []
        self._broadcasts: list[_Broadcasts] = []
        self._error: Exception | None = None  # this rank's first error

    def start(self, params: Sequence[Replicated]) -> None:
        """Computes the momentum, and the products of the matrices that this rank owns; starts all broadcasts."""
        self._members = [one.member for one in params]
        params = sorted(params, key=lambda one: one.member.largest[1:])  # on a GPU one shape is multiplied together
        own = self._products.orthogonalise(self._own(params))
        for one in params:
            member, update, calls = one.member, self._update_of(one), []
            for i, m in enumerate(member.matrices):
                if one.owns(i):
                    self._note_failure(*next(own))
                part, label = update[m.begin : m.begin + m.numel], f"step(): the update of {member.name}"
                calls.append(group_calls.broadcast_from(part, one.owners.of[one.first + i], one.owners.group, label))
            self._broadcasts.append(_Broadcasts(member, update, calls))

    def _own(self, params: Iterable[Replicated]) -> Iterator[Part]:
        for one in params:
            for i in range(len(one.member.matrices)):
                if one.owns(i):
                    yield _part(one.member, i, self._update_of(one))

    def _update_of(self, one: Replicated) -> Tensor:
        """Returns the momentum, which the update overwrites later; computed at the first call."""
        member = one.member
        if member not in self._updates:
            into = one.grad.new_empty(one.grad.numel(), dtype=member.transfer_dtype)
            MatrixCall([member]).momentum([one.grad], self._scalars, [into])
            self._updates[member] = into
        return self._updates[member]

    def _note_failure(self, part: Part, failure: Exception | None) -> None:
        """Marks a failed update with NaN, which tells the other ranks. This rank raises its error only after all
        broadcasts, because the other ranks wait for its updates."""
        if failure is None:
            return
        part.momentum.fill_(math.nan)
        if not isinstance(failure, NonFiniteProducts):
            self._error = self._error or failure_of(part.member, failure)

    def finish(self) -> None:
        """Waits for all updates and applies them. If an owner's products failed, raises RuntimeError on every rank:
        this rank's own error, or one that names the first such parameter. All other parameters are updated."""
        refused: dict[MatrixMember, Exception] = {}
        for one in self._broadcasts:
            try:
                one.finish(self._scalars)
            except RuntimeError as error:
                refused[one.member] = error
        if self._error is not None:
            raise self._error
        for member in self._members:
            if member in refused:
                raise refused[member]
