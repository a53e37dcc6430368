"""The step of matrices that are cut over the ranks of a group: under optim, optim_grads and FSDP2.

Note: rounds. What is done when is decided in C (tx_muon_exchange, where it is simulated, and its memory planned): in a
round each rank orthogonalises one matrix at most. An all-to-all brings every owner the ranks' parts of its matrix, in
the order of the ranks, which is that of the elements; another one takes the parts of the updates back. The momentum of
the next round travels beside this one's products, and so do the updates of the last one. A parameter is stepped when
all of its matrices came back on all ranks, so that one whose products failed is as it was on each of them.
"""

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_ext.comm import group_calls
from torch_ext.optim.muon.matrix_exchange import Action, CutMatrix, Do, Exchange
from torch_ext.optim.muon.matrix_member import MatrixMember, StepScalars
from torch_ext.optim.muon.newton_schulz import NON_FINITE, NonFiniteProducts
from torch_ext.optim.muon.products import Part, Products
from torch_ext.optim.muon.whole_matrices import failure_of

# What ranks tell each other of their products in a round.
_MADE, _NON_FINITE, _NOT_MADE = range(3)


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
        self, exchange: Exchange, products: Products, grads: dict[MatrixMember, Tensor], scalars: StepScalars
    ) -> None:
        """grads: this rank's parts, of all parameters that have matrices here."""
        self._exchange, self._products, self._grads, self._scalars = exchange, products, grads, scalars
        self._momenta: dict[MatrixMember, Tensor] = {}  # which become the updates
        self._coming: dict[int, _Transfer] = {}  # by round
        self._own: dict[int, Tensor] = {}  # bytes of this rank's matrix
        self._going: dict[int, tuple[_Transfer, _Transfer]] = {}  # updates, and how the products went
        self._bytes: Any = {"dtype": torch.uint8, "device": exchange.members[0].device}
        self._outcome = _MADE  # of the last products
        self._error: tuple[MatrixMember, Exception] | None = None  # this rank's first, and of which parameter

    def run(self) -> None:
        """RuntimeError on every rank, naming the first parameter of which an owner's products were not finite or could
        not be made; the others are stepped."""
        for action in self._exchange.actions():
            _DO[action.kind](self, action)
        failed = self._exchange.failed()
        if self._error is not None:
            member, error = self._error
            raise failure_of(member, error) from error
        if failed is not None:
            raise failure_of(failed.member, RuntimeError(self._why))

    def _make(self, action: Action) -> None:
        member = self._exchange.members[action.param]
        with member.named():
            into = torch.empty(member.weight.numel(), dtype=member.travels, device=member.device)
            self._momenta[member] = member.momentum(self._grads[member], self._scalars, into)

    def _gather(self, action: Action) -> None:
        """Starts the way of this rank's parts to the owners."""
        come, go = self._exchange.sizes(action.round)
        parts = [self._part(one) for one in self._exchange.of_owners(action.round) if one is not None]
        self._coming[action.round] = self._started("momentum", torch.cat(parts), come, go)

    def _receive(self, action: Action) -> None:
        self._own[action.round] = self._coming.pop(action.round).wait()

    def _multiply(self, action: Action) -> None:
        """This rank's matrix of the round, in place."""
        one = self._exchange.own(action.round)
        assert one is not None
        momentum = self._own[action.round].view(one.member.travels)
        for _, failure in self._products.orthogonalise([Part(one.member, one.matrix, momentum)]):
            if isinstance(failure, NonFiniteProducts):
                self._outcome = _NON_FINITE
            elif failure is not None:  # raised at the end: the others wait for this rank
                self._outcome, self._error = _NOT_MADE, self._error or (one.member, failure)

    def _scatter(self, action: Action) -> None:
        """Starts the way of this rank's update to all who have parts of it."""
        come, go = self._exchange.sizes(action.round)
        update = self._started("updates", self._own.pop(action.round), go, come)
        group, outcome = self._exchange.owners.group, torch.tensor([self._outcome], **self._bytes)
        outcomes = torch.empty(group.size(), **self._bytes)
        call = group_calls.all_gather(list(outcomes.split(1)), outcome, group, "step(): how Muon's products went")
        self._going[action.round] = update, _Transfer(call, outcomes, outcome)
        self._outcome = _MADE

    def _install(self, action: Action) -> None:
        """The parts of a round's updates."""
        updates, outcomes = self._going.pop(action.round)
        update = updates.wait()
        for rank, outcome in enumerate(outcomes.wait().tolist()):
            if outcome != _MADE:
                self._exchange.fail(action.round, rank)
                self._why = NON_FINITE if outcome == _NON_FINITE else _not_made(self._exchange.owners.group, rank)
        _, go = self._exchange.sizes(action.round)
        for one, (begin, end) in zip(
            self._exchange.of_owners(action.round), pairwise([0, *accumulate(go)]), strict=True
        ):
            if one is not None and begin < end:
                self._part(one).copy_(update[begin:end])

    def _update(self, action: Action) -> None:
        member = self._exchange.members[action.param]
        update = self._momenta.pop(member, None)
        with member.named():  # one of which this rank has nothing counts the step
            member.update(member.weight.new_empty(0, dtype=member.travels) if update is None else update, self._scalars)

    def _discard(self, action: Action) -> None:
        self._momenta.pop(self._exchange.members[action.param], None)

    def _started(self, what: str, sent: Tensor, come: list[int], go: list[int]) -> _Transfer:
        into = torch.empty(sum(come), **self._bytes)
        label = f"step(): {what} of Muon's matrices"
        group = self._exchange.owners.group
        return _Transfer(group_calls.all_to_all_single(into, sent, group, label, (come, go)), into, sent)

    def _part(self, one: CutMatrix) -> Tensor:
        """This rank's bytes of a matrix: of its momentum, then of its update."""
        if one.own.start == one.own.stop:
            return torch.empty(0, **self._bytes)
        return self._momenta[one.member][one.own].view(torch.uint8)


def _not_made(group: torch.distributed.ProcessGroup, rank: int) -> str:
    ranks = torch.distributed.get_process_group_ranks(group)
    return f"rank {ranks[rank]} could not make the products of its Newton-Schulz iteration, and says why"


_DO: dict[int, Callable[[CutRun, Action], None]] = {
    Do.MOMENTUM: CutRun._make,
    Do.GATHER: CutRun._gather,
    Do.RECEIVE: CutRun._receive,
    Do.MULTIPLY: CutRun._multiply,
    Do.SCATTER: CutRun._scatter,
    Do.INSTALL: CutRun._install,
    Do.UPDATE: CutRun._update,
    Do.DISCARD: CutRun._discard,
}
