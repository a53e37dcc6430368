"""The step of matrices that are sharded over the ranks of a group: under optim, optim_grads and FSDP2.

Note: rounds. A matrix can only be orthogonalised as a whole, but each rank has only a part of it. So work is done in
rounds. In a round each rank orthogonalises at most one matrix, which it owns. An all-to-all sends the momentum's parts
to the owner, in the order of the ranks, which is the order of the elements. A second all-to-all sends the parts of the
update back. Transfers overlap with products: while a round is multiplied, the momentum of the next round and the
updates of the last round are sent. A parameter is updated once all of its matrices have returned on all ranks. If the
products of one of them failed, the parameter stays unchanged on every rank. The order of these actions is decided in C
(tx_muon_exchange), where it is also simulated and its memory planned.
"""

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_ext.comm import group_calls
from torch_ext.optim.muon.matrix_calls import MatrixCall
from torch_ext.optim.muon.matrix_exchange import Action, Do, Exchange, ShardedMatrix
from torch_ext.optim.muon.matrix_member import MatrixMember, Part, StepScalars
from torch_ext.optim.muon.newton_schulz import NON_FINITE, NonFiniteProducts
from torch_ext.optim.muon.products import Products
from torch_ext.optim.muon.whole_matrices import failure_of

# The outcome of a rank's products in a round, which it sends to all ranks.
_OK, _NON_FINITE, _FAILED = range(3)


class _Transfer(NamedTuple):
    """A collective in progress, with its buffers, which must stay alive until it has ended."""

    call: group_calls.Call
    into: Tensor
    sent: Tensor

    def wait(self) -> Tensor:
        self.call.wait()
        return self.into


class ShardedStep:
    """One step of the sharded matrices of one process group."""

    def __init__(
        self, exchange: Exchange, products: Products, grads: dict[MatrixMember, Tensor], scalars: StepScalars
    ) -> None:
        """grads: this rank's shards of the gradients, of all parameters that have matrices here."""
        self._exchange, self._products, self._grads, self._scalars = exchange, products, grads, scalars
        self._momenta: dict[MatrixMember, Tensor] = {}  # overwritten by the updates
        self._incoming: dict[int, _Transfer] = {}  # round -> momentum on its way to its owner
        self._own: dict[int, Tensor] = {}  # round -> bytes of this rank's matrix
        self._outgoing: dict[int, tuple[_Transfer, _Transfer]] = {}  # round -> updates, and all ranks' outcomes
        self._bytes: Any = {"dtype": torch.uint8, "device": exchange.members[0].device}
        self._outcome = _OK  # of the products since the last _scatter
        self._error: tuple[MatrixMember, Exception] | None = None  # this rank's first error, and its parameter

    def run(self) -> None:
        """Runs the step. If an owner's products were not finite, or could not be computed, raises RuntimeError on every
        rank: this rank's own error, or one that names the first such parameter. All other parameters are updated."""
        for action in self._exchange.actions():
            _DO[action.kind](self, action)
        failed = self._exchange.failed()
        if self._error is not None:
            member, error = self._error
            raise failure_of(member, error) from error
        if failed is not None:
            matrix, reason = failed
            raise failure_of(matrix.member, RuntimeError(reason))

    def _compute_momentum(self, action: Action) -> None:
        member = self._exchange.members[action.param]
        call = MatrixCall([member])
        with call.named():
            into = torch.empty(member.weight.numel(), dtype=member.transfer_dtype, device=member.device)
        call.momentum([self._grads[member]], self._scalars, [into])
        self._momenta[member] = into

    def _gather(self, action: Action) -> None:
        """Starts the all-to-all that sends this rank's parts of the momentum to the owners."""
        receive_bytes, send_bytes = self._exchange.sizes(action.round)
        parts = [self._part(one) for one in self._exchange.matrices_of_round(action.round) if one is not None]
        self._incoming[action.round] = self._start("momentum", torch.cat(parts), receive_bytes, send_bytes)

    def _receive(self, action: Action) -> None:
        self._own[action.round] = self._incoming.pop(action.round).wait()

    def _multiply(self, action: Action) -> None:
        """Orthogonalises this rank's matrix of the round, in place."""
        one = self._exchange.own(action.round)
        assert one is not None
        momentum = self._own[action.round].view(one.member.transfer_dtype)
        for _, failure in self._products.orthogonalise([Part(one.member, one.matrix, momentum)]):
            if isinstance(failure, NonFiniteProducts):
                self._outcome = _NON_FINITE
            elif failure is not None:  # raised only at the end, because other ranks wait for this rank's messages
                self._outcome, self._error = _FAILED, self._error or (one.member, failure)

    def _scatter(self, action: Action) -> None:
        """Starts the all-to-all that returns the updates to their ranks, and the all-gather of the outcomes."""
        receive_bytes, send_bytes = self._exchange.sizes(action.round)
        update = self._start("updates", self._own.pop(action.round), send_bytes, receive_bytes)
        group, outcome = self._exchange.owners.group, torch.tensor([self._outcome], **self._bytes)
        outcomes = torch.empty(group.size(), **self._bytes)
        call = group_calls.all_gather(list(outcomes.split(1)), outcome, group, "step(): how Muon's products went")
        self._outgoing[action.round] = update, _Transfer(call, outcomes, outcome)
        self._outcome = _OK

    def _install(self, action: Action) -> None:
        """Waits for a round's updates and copies them over this rank's momentum; reports failed matrices to C."""
        updates, outcomes = self._outgoing.pop(action.round)
        update = updates.wait()
        for rank, outcome in enumerate(outcomes.wait().tolist()):
            if outcome != _OK:
                group = self._exchange.owners.group
                reason = NON_FINITE if outcome == _NON_FINITE else _failure_text(group, rank)
                self._exchange.fail(action.round, rank, reason)
        _, send_bytes = self._exchange.sizes(action.round)
        for one, (begin, end) in zip(
            self._exchange.matrices_of_round(action.round), pairwise([0, *accumulate(send_bytes)]), strict=True
        ):
            if one is not None and begin < end:
                self._part(one).copy_(update[begin:end])

    def _update(self, action: Action) -> None:
        member = self._exchange.members[action.param]
        update = self._momenta.pop(member, None)
        if update is None:  # a parameter of which this rank has no elements still counts the step
            update = member.weight.new_empty(0, dtype=member.transfer_dtype)
        MatrixCall([member]).update([update], self._scalars)

    def _discard(self, action: Action) -> None:
        self._momenta.pop(self._exchange.members[action.param], None)

    def _start(self, what: str, sent: Tensor, receive_bytes: list[int], send_bytes: list[int]) -> _Transfer:
        """Starts an all-to-all of bytes. receive_bytes, send_bytes: bytes from and to each rank."""
        into = torch.empty(sum(receive_bytes), **self._bytes)
        label = f"step(): {what} of Muon's matrices"
        group = self._exchange.owners.group
        return _Transfer(
            group_calls.all_to_all_single(into, sent, group, label, (receive_bytes, send_bytes)), into, sent
        )

    def _part(self, one: ShardedMatrix) -> Tensor:
        """Returns this rank's bytes of a matrix: its momentum, later its update."""
        if one.own.start == one.own.stop:
            return torch.empty(0, **self._bytes)
        return self._momenta[one.member][one.own].view(torch.uint8)


def _failure_text(group: torch.distributed.ProcessGroup, rank: int) -> str:
    ranks = torch.distributed.get_process_group_ranks(group)
    return f"rank {ranks[rank]} failed in the products of its Newton-Schulz iteration; the error on that rank says why"


_DO: dict[int, Callable[[ShardedStep, Action], None]] = {
    Do.MOMENTUM: ShardedStep._compute_momentum,
    Do.GATHER: ShardedStep._gather,
    Do.RECEIVE: ShardedStep._receive,
    Do.MULTIPLY: ShardedStep._multiply,
    Do.SCATTER: ShardedStep._scatter,
    Do.INSTALL: ShardedStep._install,
    Do.UPDATE: ShardedStep._update,
    Do.DISCARD: ShardedStep._discard,
}
