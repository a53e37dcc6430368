"""The step of matrices that are cut over the ranks of a group: under optim, optim_grads and FSDP2.

Note: rounds. In a round each rank orthogonalises one matrix at most: the k-th of those that it owns. An all-to-all
brings every owner the ranks' parts of its matrix, in the order of the ranks, which is that of the elements; another one
takes the parts of the updates back. The momentum of the next round travels beside this one's products, and so do the
updates of the last one. A parameter's momentum is made for the first round that one of its matrices is in, and freed
when the last one's update is there: a rank holds no more than three rounds' parts, two matrices of its own and the two
messages that are under way.
"""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from torch_ext.comm import group_calls
from torch_ext.optim.muon.matrix_forms import Matrix
from torch_ext.optim.muon.matrix_member import MatrixMember, StepScalars
from torch_ext.optim.muon.newton_schulz import NON_FINITE
from torch_ext.optim.muon.owners import Owners, agreed_smallest
from torch_ext.optim.muon.products import Products

_NOBODY = 2**62  # the number of no matrix


class CutMatrix(NamedTuple):
    """One of a parameter's matrices."""

    member: MatrixMember
    matrix: Matrix
    number: int  # in the group
    own: slice  # in this rank's elements of the parameter
    numels: tuple[int, ...]  # of each rank's part

    def nbytes(self, rank: int) -> int:
        """Of a rank's part."""
        return self.numels[rank] * self.member.travels.itemsize


def cut_matrices(member: MatrixMember, first: int) -> list[CutMatrix]:
    """first: the number of its first matrix."""
    sharing = member.sharing
    assert sharing is not None and sharing.runs is not None
    own = {piece.matrix: slice(piece.begin, piece.end) for piece in member.pieces}
    found = []
    for i, m in enumerate(member.matrices):
        begin, end = m.begin, m.begin + m.numel
        numels = (max(0, min(b, end) - max(a, begin)) for a, b in sharing.runs)
        found.append(CutMatrix(member, m, first + i, own.get(i, slice(0, 0)), tuple(numels)))
    return found


def rounds_of(matrices: Sequence[CutMatrix], owners: Owners) -> "list[Round]":
    """matrices: all of the group's that are cut."""
    by_owner: list[list[CutMatrix]] = [[] for _ in range(owners.group.size())]
    for one in matrices:
        by_owner[owners.of[one.number]].append(one)
    count = max(map(len, by_owner), default=0)
    return [Round([of[k] if k < len(of) else None for of in by_owner], owners.rank) for k in range(count)]


class Round:
    """Matrices that are orthogonalised at the same time."""

    def __init__(self, of_owners: Sequence[CutMatrix | None], rank: int) -> None:
        """of_owners: of each rank."""
        self.of_owners, self.own, self._rank = of_owners, of_owners[rank], rank

    def sizes(self) -> tuple[list[int], list[int]]:
        """Bytes that come from each rank, of this one's matrix; and that go to each, of theirs."""
        ranks = range(len(self.of_owners))
        come = [0 if self.own is None else self.own.nbytes(rank) for rank in ranks]
        return come, [0 if one is None else one.nbytes(self._rank) for one in self.of_owners]


class _Transfer(NamedTuple):
    """A message to and from every rank, which are kept until it ended."""

    call: group_calls.Call
    into: Tensor
    sent: Tensor

    def wait(self) -> Tensor:
        self.call.wait()
        return self.into


class CutRun:
    """One step of the cut matrices of one group."""

    def __init__(
        self,
        rounds: Sequence[Round],
        owners: Owners,
        products: Products,
        grads: dict[MatrixMember, Tensor],
        scalars: StepScalars,
    ) -> None:
        """grads: this rank's parts, of all parameters that have matrices here."""
        self._rounds, self._owners, self._products = rounds, owners, products
        self._grads, self._scalars = grads, scalars
        self._momenta: dict[MatrixMember, Tensor] = {}  # which become the updates
        self._left = {member: len(member.pieces) for member in grads}  # that did not come back
        self._failed: dict[int, str] = {}  # names, by the numbers of matrices

    def run(self) -> None:
        """RuntimeError on every rank, naming the first parameter of which an owner's products were not finite; the
        others are stepped."""
        for member in [member for member, left in self._left.items() if not left]:
            self._update(member, torch.empty(0, dtype=member.travels))  # counts the step
        coming, going = self._gathered(self._rounds[0]), None
        for this, following in pairwise([*self._rounds, None]):
            assert this is not None
            momentum, coming = coming.wait(), self._gathered(following) if following is not None else coming
            before, going = going, (this, self._scattered(this, self._orthogonalised(this, momentum)))
            if before is not None:
                self._install(*before)
        assert going is not None
        self._install(*going)
        self._refuse_failed()

    def _gathered(self, this: Round) -> _Transfer:
        """Starts the way of this rank's parts to the owners."""
        come, go = this.sizes()
        parts = [self._part(one) for one in this.of_owners if one is not None]
        return self._started("momentum", torch.cat(parts), come, go)

    def _scattered(self, this: Round, update: Tensor) -> _Transfer:
        """Starts the way of this rank's update to all who have parts of it."""
        come, go = this.sizes()
        return self._started("updates", update, go, come)

    def _started(self, what: str, sent: Tensor, come: list[int], go: list[int]) -> _Transfer:
        into = torch.empty(sum(come), dtype=torch.uint8)
        label = f"step(): {what} of Muon's matrices"
        return _Transfer(group_calls.all_to_all_single(into, sent, self._owners.group, label, (come, go)), into, sent)

    def _part(self, one: CutMatrix) -> Tensor:
        """This rank's bytes of a matrix: of its momentum, then of its update."""
        member = one.member
        if one.own.start == one.own.stop:
            return torch.empty(0, dtype=torch.uint8)
        if member not in self._momenta:
            with member.named():
                into = torch.empty(member.weight.numel(), dtype=member.travels)
                self._momenta[member] = member.momentum(self._grads[member], self._scalars, into)
        return self._momenta[member][one.own].view(torch.uint8)

    def _orthogonalised(self, this: Round, momentum: Tensor) -> Tensor:
        """This rank's matrix of the round, in place."""
        if this.own is not None:
            member = this.own.member
            with member.named():
                self._products.orthogonalise_or_mark(member, this.own.matrix, momentum.view(member.travels))
        return momentum

    def _install(self, this: Round, transfer: _Transfer) -> None:
        """The parts of a round's updates, and steps the parameters that are complete."""
        _, go = this.sizes()
        update = transfer.wait()
        for one, (begin, end) in zip(this.of_owners, pairwise([0, *accumulate(go)]), strict=True):
            if one is None or begin == end:
                continue
            self._part(one).copy_(update[begin:end])
            if math.isnan(float(self._momenta[one.member][one.own.start])):
                self._failed[one.number] = one.member.name
            self._left[one.member] -= 1
            if not self._left[one.member]:
                self._update(one.member, self._momenta.pop(one.member))

    def _update(self, member: MatrixMember, update: Tensor) -> None:
        if member.name not in self._failed.values():
            with member.named():
                member.update(update, self._scalars)

    def _refuse_failed(self) -> None:
        """Collective: not every rank has a part of each matrix."""
        first = agreed_smallest(min(self._failed, default=_NOBODY), self._owners.group, "whether products are finite")
        if first != _NOBODY:
            everyone = (one for this in self._rounds for one in this.of_owners if one is not None)
            name = next(one.member.name for one in everyone if one.number == first)
            raise RuntimeError(f"{name}: {NON_FINITE}; its weights are as they were")
