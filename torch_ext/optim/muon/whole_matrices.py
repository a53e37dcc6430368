"""The step of matrices that this rank has all of: alone, or with ranks that have the same.

Where ranks have the same gradients (no_shard) they all start the broadcasts of all updates in one order, their own as
soon as they are made, so that updates travel beside the products of others; momentum and weights are stepped on each.
"""

import math
from collections.abc import Sequence

from torch import Tensor

from torch_ext.comm import group_calls
from torch_ext.optim.muon.matrix_forms import Matrix
from torch_ext.optim.muon.matrix_member import MatrixMember, StepScalars
from torch_ext.optim.muon.newton_schulz import NON_FINITE, NonFiniteProducts
from torch_ext.optim.muon.owners import Owners
from torch_ext.optim.muon.products import Products


def step_alone(member: MatrixMember, grad: Tensor, products: Products, scalars: StepScalars) -> None:
    """Of a parameter that no other rank shares. RuntimeError, naming it, where a product is not finite."""
    with member.named():
        update = member.momentum(grad, scalars, products.momentum_of(member))
        if len(member.matrices) == 1:
            update = products.orthogonalised(member, member.matrices[0], update)
        else:
            for m in member.matrices:
                products.orthogonalise(member, m, update[m.begin : m.begin + m.numel])
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
        with member.named():
            if any(math.isnan(float(self._update[m.begin])) for m in member.matrices):
                raise NonFiniteProducts(NON_FINITE)
            member.update(self._update, scalars)


class ReplicatedRun:
    """One step of matrices that all ranks of their groups have."""

    def __init__(self, products: Products, scalars: StepScalars) -> None:
        self._products, self._scalars = products, scalars
        self._sent: list[_Sent] = []
        self._error: Exception | None = None  # this rank's first

    def start(self, member: MatrixMember, grad: Tensor, owners: Owners, first: int) -> None:
        """Momentum, the products of those that are this rank's, and the broadcasts. first: the number of its first
        matrix."""
        with member.named():
            update = member.momentum(grad, self._scalars, grad.new_empty(grad.numel(), dtype=member.travels))
            calls = []
            for number, m in enumerate(member.matrices, first):
                part = update[m.begin : m.begin + m.numel]
                if owners.of[number] == owners.rank:
                    self._orthogonalise(member, m, part)
                label = f"step(): the update of {member.name}"
                calls.append(group_calls.broadcast_from(part, owners.of[number], owners.group, label))
        self._sent.append(_Sent(member, update, calls))

    def _orthogonalise(self, member: MatrixMember, m: Matrix, part: Tensor) -> None:
        """What fails is raised when all updates came: the others wait for this rank's."""
        try:
            self._products.orthogonalise_or_mark(member, m, part)
        except (RuntimeError, MemoryError) as error:
            part.fill_(math.nan)
            self._error = self._error or type(error)(f"{member.name}: {error}; its weights are as they were")

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
