"""Where gradients lie between backward and step, and how a bucket of them is reduced: one class for each strategy.

Note [strategies]

| | no_shard, optim | optim_grads |
|---|---|---|
| a ready gradient | `.grad`, a view of a flat unsharded buffer in main_grads_dtype | kept until its bucket is sent |
| a bucket is sent | from the buffer, through a bucket of the wire's dtype where that differs | from such a bucket |
| its sum | goes to every rank, rounded once (no_shard); into this rank's part of it (optim) | is added to the shard |

In all three the sum is fp32, in rank order; what the optimizer reads is in main_grads_dtype.

Neighbouring buckets may be sent as one (`parallel/message_plan.py`). Under no_shard they are simply one bucket: it
does not matter who adds up which part of a sum that all ranks get. Under the others a rank owns its part of each
bucket, so the message is packed apart, with each rank's parts side by side.
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
    """The gradients of one reducer's parameters. Parameters i and buckets b are positions in the plan."""

    kind: int
    """Its row of the gradient cycle (parallel/cycle.py)."""
    sharded = True
    """Whether each rank steps its own parts of the parameters only."""
    can_rebuild = True
    """Whether gradients that are not sent yet can be laid out by another plan (`rebuilt`)."""

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        plan: BucketPlan,
        communicator: Communicator,
        ids: Sequence[int],
        divide_factor: float,
        gather_dtype: torch.dtype | None,
    ) -> None:
        """ids: of each parameter, for the thresholds of an 8-bit wire. gather_dtype: what no_shard gathers sums in;
        None: bf16 beside an 8-bit wire, else the wire's dtype."""
        self.params, self.plan, self.communicator, self.ids = params, plan, communicator, ids
        self.divide_factor, self.gather_dtype = divide_factor, gather_dtype
        self.temporary = TemporaryBuckets(communicator)
        self.members = [
            pieces(plan, range(b, b + 1), (bucket.start, bucket.start + bucket.numel))
            for b, bucket in enumerate(plan.buckets)
        ]
        own = Part(communicator.rank, communicator.world_size)
        self.owned: dict[int, tuple[int, ParamSlice]] = {}  # by parameter: the bucket, and the run in this rank's part
        for b in range(len(plan.buckets)):
            for piece in pieces(plan, range(b, b + 1), part_of(plan, range(b, b + 1), own)):
                self.owned[piece.param] = (b, piece)
        self._by_rank: dict[range, list[ParamSlice]] = {}
        self.stats = stats.zeros(communicator.device)
        """Of what this rank's parts hold since the last reduction (sharded strategies)."""

    def rebuilt(self, plan: BucketPlan) -> "ShardingStrategy":
        """This strategy with another plan for the same parameters, which takes over the gradients. Called where
        `can_rebuild`; this object is not used afterwards."""
        raise NotImplementedError

    @property
    @abc.abstractmethod
    def memory(self) -> list[torch.Tensor]:
        """The tensors in which gradients lie between backwards."""

    @property
    def adds_to_sums(self) -> bool:
        """Whether a gradient has to be prepared before the next one is accumulated into it."""
        return False

    @property
    def sets_aside(self) -> bool:
        """Whether some earlier sum is kept apart, to which the next one is added."""
        return False

    # -- during backward

    def begin_backward(self, reducing: bool) -> None:
        """The first gradient of a backward is about to be ready. reducing: not under no_sync."""
        if reducing:
            self.stats.zero_()

    def in_place(self, i: int) -> bool:
        """Whether `.grad` of parameter i is where a reduction leaves it, not a tensor assigned by the user."""
        return False

    @abc.abstractmethod
    def grad_ready(self, i: int) -> None:
        """`.grad` of parameter i is this rank's whole gradient."""

    def grads_ready(self, positions: Sequence[int]) -> None:
        """`grad_ready` of each."""
        for i in positions:
            self.grad_ready(i)

    @abc.abstractmethod
    def discard(self, positions: Sequence[int]) -> None:
        """`.grad` of these parameters came from a backward that raised before `grads_ready` was told."""

    @abc.abstractmethod
    def prepare(self, i: int, flags: int) -> None:
        """Of `.grad` of parameter i: what parallel/cycle.py's Prepare says, before it counts in the next sum."""

    @abc.abstractmethod
    def grads(self, b: int) -> list[tuple[int, torch.Tensor]]:
        """This rank's gradients of a complete bucket, with their positions."""

    @abc.abstractmethod
    def send(
        self, buckets: range, *, cycle: int, tag: int, label: str, on_reduced: Callable[[], None] | None = None
    ) -> Work:
        """Starts to reduce complete buckets, neighbours in one buffer, as one message. on_reduced: called when this
        rank's parts hold the sums (sharded strategies); any thread."""

    # -- between backwards

    @abc.abstractmethod
    def end_cycle(self, anywhere: Sequence[bool], reduced_before: Sequence[bool]) -> None:
        """A cycle ended without an error. anywhere: which parameters have a gradient on some rank; reduced_before:
        which have on every rank what an earlier reduction left, and got no gradient since."""

    def modified_since(self, versions: list[int]) -> list[int]:
        """Parameters that may have a gradient that is this rank's own. versions: of the gradients, when none had."""
        return []

    def unreduced(self, i: int) -> bool:
        """Whether parameter i has a gradient that is this rank's own, if one was ready since the last reduction."""
        return self.params[i].grad is not None

    @abc.abstractmethod
    def grad(self, i: int) -> torch.Tensor | None:
        """What this rank's optimizer reads of parameter i: its own part, flat, maybe empty. None: no gradient."""

    def part(self, i: int) -> torch.Tensor:
        """The memory in which `grad` finds it, whether or not there is a gradient. Only of sharded strategies."""
        raise NotImplementedError

    @abc.abstractmethod
    def versions(self) -> list[int]:
        """Version counters, which change when a gradient is modified."""

    @abc.abstractmethod
    def zero(self, params: Sequence[int]) -> None:
        """zero_grad() of these parameters; `.grad` itself is the caller's."""

    @abc.abstractmethod
    def release(self) -> None:
        """Leaves the parameters as they were before, without gradients."""

    def _wire_of(
        self, buckets: range, values: Sequence[torch.Tensor], members: Sequence[ParamSlice], cycle: int
    ) -> WireBuffer:
        """A temporary bucket in the wire's dtype with these values."""
        numel = sum(self.plan.buckets[b].numel for b in buckets)
        wire = self.temporary.take(buckets.start, numel, self.plan.buckets[buckets[0]].grad_comm_dtype)
        pack(values, members, self.ids, wire, RoundingSeeds.of_parts(self.communicator.rank, cycle))
        return wire

    def _members_of(self, buckets: range) -> list[ParamSlice]:
        """Where the parameters' elements lie in the message that these buckets make."""
        if buckets not in self._by_rank:
            self._by_rank[buckets] = by_rank(self.plan, buckets, self.communicator.world_size)
        return self._by_rank[buckets]

    def _slots_needed(self, buckets: range) -> int:
        """Of the IN_FLIGHT slots: joined buckets need more memory."""
        if len(buckets) == 1:
            return 1
        whole = len(buckets) == len(self.plan.buffers[self.plan.buckets[buckets[0]].buffer])
        return IN_FLIGHT if whole else IN_FLIGHT // 2

    def _scale(self) -> float:
        return 1.0 / self.divide_factor


class BufferedStrategy(ShardingStrategy):
    """Gradients accumulate in flat, unsharded buffers of main_grads_dtype."""

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
        """`modified_since` tells of them."""

    def grads(self, b: int) -> list[tuple[int, torch.Tensor]]:
        return [(p.param, self.buffers.view(p.param)) for p in self.members[b]]

    def main(self, buckets: range) -> WireBuffer:
        """Neighbours in the buffer: where gradients accumulate."""
        main = self._mains.get(buckets)
        if main is None:
            first, last = self.plan.buckets[buckets[0]], self.plan.buckets[buckets[-1]]
            main = WireBuffer.of(self.buffers.flats[first.buffer][first.start : last.start + last.numel])
            self._mains[buckets] = main
        return main

    def slices(self, buckets: range) -> list[ParamSlice]:
        """The parameters in `main`."""
        if buckets not in self._slices:
            begin = self.plan.buckets[buckets[0]].start
            offsets = [(b, self.plan.buckets[b].start - begin) for b in buckets]
            self._slices[buckets] = [p._replace(at=offset + p.at) for b, offset in offsets for p in self.members[b]]
        return self._slices[buckets]

    def packed(self, buckets: range, cycle: int) -> WireBuffer:
        """Neighbours as they travel: themselves, or a temporary bucket."""
        planned, main = self.plan.buckets[buckets[0]], self.main(buckets).data
        if planned.grad_comm_dtype == planned.main_grads_dtype:
            return self.main(buckets)
        if planned.grad_comm_dtype == CODES:
            members = self.slices(buckets)
            return self._wire_of(buckets, [main[p.at : p.at + p.numel] for p in members], members, cycle)
        return self._wire_of(buckets, [main], [ParamSlice(0, 0, main.numel(), 0)], cycle)

    def end_cycle(self, anywhere: Sequence[bool], reduced_before: Sequence[bool]) -> None:
        # Sums are written without autograd's knowledge.
        torch.autograd.graph.increment_version(self.buffers.flats)
        self.buffers.install_all(anywhere)

    def modified_since(self, versions: list[int]) -> list[int]:
        changed = self.versions() != versions
        return [i for i, p in enumerate(self.params) if p.grad is not None and (changed or not self.buffers.holds(i))]

    def versions(self) -> list[int]:
        return [flat._version for flat in self.memory]

    def zero(self, params: Sequence[int]) -> None:
        """`.grad` is all there is."""

    def release(self) -> None:
        self.buffers.release()
