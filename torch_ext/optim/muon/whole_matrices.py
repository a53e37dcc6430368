"""The step of matrices that this rank has all of: alone, or with ranks that have the same.

Where ranks have the same gradients (no_shard) they all start the broadcasts of all updates in one order, their own as
soon as they are made, so that updates travel beside the products of others; momentum and weights are stepped on each.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from torch_ext.comm import group_calls
from torch_ext.native import constants
from torch_ext.optim.muon.matrix_member import MatrixMember, StepScalars
from torch_ext.optim.muon.newton_schulz import NON_FINITE, NonFiniteProducts
from torch_ext.optim.muon.owners import Owners
from torch_ext.optim.muon.products import Part, Products
from torch_ext.optim.step_progress import NotStepped


def step_alone(grads: dict[MatrixMember, Tensor], products: Products, scalars: StepScalars) -> None:
    """Of parameters that no other rank shares. RuntimeError, naming the first of which a product is not finite or could
    not be made; the others are stepped."""
    failed: dict[MatrixMember, Exception] = {}
    for window in products.windows(list(grads)):
        updates: dict[MatrixMember, Tensor] = {}
        for i, member in enumerate(window):
            with member.named():
                updates[member] = member.momentum(grads[member], scalars, products.momentum_of(member, i))
        parts = (_part(member, i, updates[member]) for member in window for i in range(len(member.matrices)))
        for part, failure in products.orthogonalise(parts, constants.MUON_PER_LANE):
            if failure is not None:
                failed.setdefault(part.member, failure)
        for member, update in updates.items():
            if member not in failed:
                _update(member, update, scalars)
    for member in grads:
        if member in failed:
            raise failure_of(member, failed[member])


def failure_of(member: MatrixMember, error: Exception) -> NotStepped:
    """What is raised of a parameter that was not stepped."""
    kind = NonFiniteProducts if isinstance(error, NonFiniteProducts) else NotStepped
    return kind(f"{member.name}: {error}; its weights are as they were, and other parameters are stepped")


def _part(member: MatrixMember, i: int, momentum: Tensor) -> Part:
    m = member.matrices[i]
    return Part(member, m, momentum[m.begin : m.begin + m.numel])


def _update(member: MatrixMember, update: Tensor, scalars: StepScalars) -> None:
    with member.named():
        member.update(update, scalars)


class _Sent:
    """A parameter whose updates are under way."""

    def __init__(self, member: MatrixMember, update: Tensor, calls: Sequence[group_calls.Call]) -> None:
        self._member, self._update, self._calls = member, update, calls

    def finish(self, scalars: StepScalars) -> None:
        """Waits, and steps the weights."""
        for call in self._calls:
            call.wait()
        member = self._member
        if any(math.isnan(float(self._update[m.begin])) for m in member.matrices):
            raise failure_of(member, NonFiniteProducts(NON_FINITE))
        _update(member, self._update, scalars)


class Replicated(NamedTuple):
    """A parameter that all ranks of a group have."""

    member: MatrixMember
    grad: Tensor
    owners: Owners
    first: int  # the number of its first matrix

    def owns(self, matrix: int) -> bool:
        return self.owners.of[self.first + matrix] == self.owners.rank


class ReplicatedRun:
    """One step of matrices that all ranks of their groups have."""

    def __init__(self, products: Products, scalars: StepScalars) -> None:
        self._products, self._scalars = products, scalars
        self._updates: dict[MatrixMember, Tensor] = {}
        self._sent: list[_Sent] = []
        self._error: Exception | None = None  # this rank's first

    def start(self, params: Sequence[Replicated]) -> None:
        """Momentum, the products of those that are this rank's, and the broadcasts."""
        own = self._products.orthogonalise(self._own(params))
        for one in params:
            member, update, calls = one.member, self._update_of(one), []
            for i, m in enumerate(member.matrices):
                if one.owns(i):
                    self._mark(*next(own))
                part, label = update[m.begin : m.begin + m.numel], f"step(): the update of {member.name}"
                calls.append(group_calls.broadcast_from(part, one.owners.of[one.first + i], one.owners.group, label))
            self._sent.append(_Sent(member, update, calls))

    def _own(self, params: Iterable[Replicated]) -> Iterator[Part]:
        for one in params:
            for i in range(len(one.member.matrices)):
                if one.owns(i):
                    yield _part(one.member, i, self._update_of(one))

    def _update_of(self, one: Replicated) -> Tensor:
        """Momentum, which becomes the update: made when it is first asked for."""
        member = one.member
        if member not in self._updates:
            into = one.grad.new_empty(one.grad.numel(), dtype=member.travels)
            with member.named():
                self._updates[member] = member.momentum(one.grad, self._scalars, into)
        return self._updates[member]

    def _mark(self, part: Part, failure: Exception | None) -> None:
        """What fails is raised when all updates came: the others wait for this rank's. They learn it by a NaN."""
        if failure is None:
            return
        part.momentum.fill_(math.nan)
        if not isinstance(failure, NonFiniteProducts):
            self._error = self._error or failure_of(part.member, failure)

    def finish(self) -> None:
        """RuntimeError on every rank, naming the first parameter of which an owner's products were not finite, or what
        kept this one from making them; the others are stepped."""
        refused = self._error
        for one in self._sent:
            try:
                one.finish(self._scalars)
            except RuntimeError as error:
                refused = refused or error
        if refused is not None:
            raise refused
