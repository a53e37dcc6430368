"""Where gradients are stored between backward and step, and how a bucket is reduced: one class for each strategy.

Note [strategies]

| | no_shard, optim | optim_grads |
|---|---|---|
| a ready gradient | `.grad`, a view of a flat unsharded buffer in main_grads_dtype | kept until its bucket is sent |
| a bucket is sent | from the buffer; if the wire's dtype differs, from a temporary copy in it | from such a copy |
| its sum | goes to every rank, rounded once (no_shard), or to this rank's part (optim) | is added to the shard |

Under all three the sum is computed in fp32, in rank order; the optimizer reads it in main_grads_dtype.

Neighbouring buckets may be sent as one message (`parallel/message_plan.py`). Under no_shard they are treated as one
larger bucket: all ranks get the whole sum, so it does not matter which rank adds up which part. Under the sharded
strategies a rank owns its part of each bucket, so the message is a copy in which each rank's parts are contiguous.
"""

import abc
from collections.abc import Callable, Sequence

import torch

from torch_ext.comm.communicator import IN_FLIGHT, Communicator, Part, Work
from torch_ext.comm.wire import CODES, ParamSlice, RoundingSeeds, WireBuffer, pack
from torch_ext.grads import stats
from torch_ext.parallel.bucket_plan import BucketPlan, by_rank, part_of, pieces
from torch_ext.parallel.grad_buffers import GradBuffers, TemporaryBuckets


class ShardingStrategy(abc.ABC):
    """Stores and sends the gradients of one reducer's parameters. `i` is a parameter's position in the plan, `b` a
    bucket's."""

    kind: int
    """Its tx_cycle_kind (parallel/cycle.py)."""
    sharded = True
    """Whether each rank steps only its own parts of the parameters."""
    can_rebuild = True
    """Whether gradients that were not sent yet can be moved to another plan's layout (`rebuilt`)."""

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        plan: BucketPlan,
        communicator: Communicator,
        ids: Sequence[int],
        divide_factor: float,
        gather_dtype: torch.dtype | None,
    ) -> None:
        """ids: each parameter's id, for the rounding thresholds of an 8-bit wire. gather_dtype: the dtype in which
        no_shard all-gathers sums; None: bf16 with an 8-bit wire, else the wire's dtype."""
        self.params, self.plan, self.communicator, self.ids = params, plan, communicator, ids
        self.divide_factor, self.gather_dtype = divide_factor, gather_dtype
        self.temporary = TemporaryBuckets(communicator)
        self.members = [
            pieces(plan, range(b, b + 1), (bucket.start, bucket.start + bucket.numel))
            for b, bucket in enumerate(plan.buckets)
        ]
        own = Part(communicator.rank, communicator.world_size)
        self.owned: dict[int, tuple[int, ParamSlice]] = {}  # by parameter: its bucket, its slice in this rank's part
        for b in range(len(plan.buckets)):
            for piece in pieces(plan, range(b, b + 1), part_of(plan, range(b, b + 1), own)):
                self.owned[piece.param] = (b, piece)
        self._by_rank: dict[range, list[ParamSlice]] = {}
        self.stats = stats.zeros(communicator.device)
        """Gradient statistics (grad_stats_) of the sums in this rank's parts, since the last reduction (sharded
        strategies)."""

    def rebuilt(self, plan: BucketPlan) -> "ShardingStrategy":
        """Returns this strategy with another plan for the same parameters; it takes over the gradients. Only if
        `can_rebuild`; this object must not be used afterwards."""
        raise NotImplementedError

    @property
    @abc.abstractmethod
    def memory(self) -> list[torch.Tensor]:
        """The tensors that hold the gradients between backwards."""

    @property
    def prepares_grads(self) -> bool:
        """Whether an earlier sum in `.grad` has to be prepared before autograd accumulates into it."""
        return False

    @property
    def has_set_aside(self) -> bool:
        """Whether an earlier sum is stored outside the buffer, to be added to the next one."""
        return False

    # -- during backward

    def begin_backward(self, reducing: bool) -> None:
        """Called before the first gradient of a backward is ready. reducing: False under no_sync()."""
        if reducing:
            self.stats.zero_()

    def in_place(self, i: int) -> bool:
        """Whether `.grad` of parameter i is the tensor that holds the reduction's result, not one that was assigned."""
        return False

    @abc.abstractmethod
    def grad_ready(self, i: int) -> None:
        """Called when `.grad` of parameter i is this rank's complete gradient."""

    def grads_ready(self, positions: Sequence[int]) -> None:
        """Calls `grad_ready` for each."""
        for i in positions:
            self.grad_ready(i)

    @abc.abstractmethod
    def discard(self, positions: Sequence[int]) -> None:
        """Drops `.grad` of these parameters: their backward raised before `grads_ready` was called for them."""

    @abc.abstractmethod
    def prepare(self, i: int, flags: int) -> None:
        """Does with `.grad` of parameter i what the Prepare flags (parallel/cycle.py) say, before it is added to the
        next sum."""

    @abc.abstractmethod
    def grads(self, b: int) -> list[tuple[int, torch.Tensor]]:
        """Returns this rank's gradients of a complete bucket, each with its parameter's position."""

    @abc.abstractmethod
    def send(
        self, buckets: range, *, cycle: int, tag: int, label: str, on_reduced: Callable[[], None] | None = None
    ) -> Work:
        """Starts to reduce complete buckets, neighbours in one buffer, as one message. on_reduced: called on any thread
        once this rank's parts hold the sums (sharded strategies)."""

    # -- between backwards

    @abc.abstractmethod
    def end_cycle(self, anywhere: Sequence[bool], reduced_before: Sequence[bool]) -> None:
        """Called when a cycle ended without an error. By parameter, anywhere: whether some rank has a gradient;
        reduced_before: whether all ranks still have an earlier reduction's result and got no gradient since."""

    def modified_since(self, versions: list[int]) -> list[int]:
        """Returns the parameters whose gradient may be unreduced, this rank's own. versions: the version counters when
        all gradients were reduced."""
        return []

    def unreduced(self, i: int) -> bool:
        """Given that a gradient became ready since the last reduction: whether parameter i has an unreduced one."""
        return self.params[i].grad is not None

    @abc.abstractmethod
    def grad(self, i: int) -> torch.Tensor | None:
        """Returns the gradient that this rank's optimizer reads for parameter i; under sharded strategies this rank's
        part, flat, maybe empty. None: no gradient."""

    def part(self, i: int) -> torch.Tensor:
        """Returns the memory of `grad`'s result, whether or not there is a gradient. Sharded strategies only."""
        raise NotImplementedError

    @abc.abstractmethod
    def versions(self) -> list[int]:
        """Returns the version counters of `memory`; they change when a gradient is modified."""

    @abc.abstractmethod
    def zero(self, params: Sequence[int]) -> None:
        """Handles zero_grad() of these parameters, except `.grad` itself, which the caller drops or zeroes."""

    @abc.abstractmethod
    def release(self) -> None:
        """Restores the parameters to plain ones without gradients."""

    def _wire_of(
        self, buckets: range, values: Sequence[torch.Tensor], members: Sequence[ParamSlice], cycle: int
    ) -> WireBuffer:
        """Packs these values into a temporary bucket in the wire's dtype, and returns it."""
        numel = sum(self.plan.buckets[b].numel for b in buckets)
        wire = self.temporary.take(buckets.start, numel, self.plan.buckets[buckets[0]].grad_comm_dtype)
        pack(values, members, self.ids, wire, RoundingSeeds.of_parts(self.communicator.rank, cycle))
        return wire

    def _members_of(self, buckets: range) -> list[ParamSlice]:
        """Returns the slices of the parameters in the message that these buckets form, each rank's parts contiguous."""
        if buckets not in self._by_rank:
            self._by_rank[buckets] = by_rank(self.plan, buckets, self.communicator.world_size)
        return self._by_rank[buckets]

    def _slots_needed(self, buckets: range) -> int:
        """Returns how many of the IN_FLIGHT slots a message of these buckets takes: joined buckets need more memory."""
        if len(buckets) == 1:
            return 1
        whole = len(buckets) == len(self.plan.buffers[self.plan.buckets[buckets[0]].buffer])
        return IN_FLIGHT if whole else IN_FLIGHT // 2

    def _scale(self) -> float:
        return 1.0 / self.divide_factor


class BufferedStrategy(ShardingStrategy):
    """Base class of strategies whose gradients accumulate in flat, unsharded buffers in main_grads_dtype."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.buffers = GradBuffers(self.params, self.plan)
        self._mains: dict[range, WireBuffer] = {}
        self._slices: dict[range, list[ParamSlice]] = {}

    @property
    def memory(self) -> list[torch.Tensor]:
        return self.buffers.flats

    def rebuilt(self, plan: BucketPlan) -> "ShardingStrategy":
        other = type(self)(self.params, plan, self.communicator, self.ids, self.divide_factor, self.gather_dtype)
        for i, param in enumerate(self.params):
            if param.grad is not None:
                other.grad_ready(i)
        return other

    def in_place(self, i: int) -> bool:
        return self.buffers.is_ours(i)

    def grad_ready(self, i: int) -> None:
        self.buffers.take(i)

    def begin_backward(self, reducing: bool) -> None:
        super().begin_backward(reducing)
        self.buffers.find()

    def grads_ready(self, positions: Sequence[int]) -> None:
        self.buffers.take_all(positions)

    def discard(self, positions: Sequence[int]) -> None:
        """Does nothing: `modified_since` returns these parameters."""

    def grads(self, b: int) -> list[tuple[int, torch.Tensor]]:
        return [(p.param, self.buffers.view(p.param)) for p in self.members[b]]

    def main(self, buckets: range) -> WireBuffer:
        """Returns the range of the buffer that these neighbouring buckets cover, where gradients accumulate."""
        main = self._mains.get(buckets)
        if main is None:
            first, last = self.plan.buckets[buckets[0]], self.plan.buckets[buckets[-1]]
            main = WireBuffer.of(self.buffers.flats[first.buffer][first.start : last.start + last.numel])
            self._mains[buckets] = main
        return main

    def slices(self, buckets: range) -> list[ParamSlice]:
        """Returns the slices of the parameters in `main`."""
        if buckets not in self._slices:
            begin = self.plan.buckets[buckets[0]].start
            offsets = [(b, self.plan.buckets[b].start - begin) for b in buckets]
            self._slices[buckets] = [p._replace(at=offset + p.at) for b, offset in offsets for p in self.members[b]]
        return self._slices[buckets]

    def packed(self, buckets: range, cycle: int) -> WireBuffer:
        """Returns neighbouring buckets as they are sent: their range of the buffer, or a temporary bucket."""
        planned, main = self.plan.buckets[buckets[0]], self.main(buckets).data
        if planned.grad_comm_dtype == planned.main_grads_dtype:
            return self.main(buckets)
        if planned.grad_comm_dtype == CODES:
            members = self.slices(buckets)
            return self._wire_of(buckets, [main[p.at : p.at + p.numel] for p in members], members, cycle)
        return self._wire_of(buckets, [main], [ParamSlice(0, 0, main.numel(), 0)], cycle)

    def end_cycle(self, anywhere: Sequence[bool], reduced_before: Sequence[bool]) -> None:
        # C wrote the sums, which no version counter counts.
        torch.autograd.graph.increment_version(self.buffers.flats)
        self.buffers.install_all(anywhere)

    def modified_since(self, versions: list[int]) -> list[int]:
        changed = self.versions() != versions
        return [i for i, p in enumerate(self.params) if p.grad is not None and (changed or not self.buffers.holds(i))]

    def versions(self) -> list[int]:
        return [flat._version for flat in self.memory]

    def zero(self, params: Sequence[int]) -> None:
        """Does nothing: there is no gradient besides `.grad`."""

    def release(self) -> None:
        self.buffers.release()
