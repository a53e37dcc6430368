"""optim: master weights and moments are sharded over the ranks; weights are all-gathered after the step."""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from torch_ext.comm.communicator import Part, Work
from torch_ext.comm.wire import WireBuffer, reduce_chunks
from torch_ext.parallel.cycle import OPTIM, Prepare
from torch_ext.parallel.strategies.strategy import BufferedStrategy


class ShardedOptimizer(BufferedStrategy):
    """optim: the sum is written to this rank's part of the flat buffer; the rest keeps this rank's own gradient."""

    kind = OPTIM

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self._views = {i: self._owned_view(i) for i in range(len(self.params))}
        self._earlier_sums: dict[int, torch.Tensor] = {}  # sums of earlier cycles, added to the next ones

    def _owned_view(self, i: int) -> torch.Tensor:
        flat = self.buffers.flats[self.plan.parameters[i].buffer]
        if i not in self.owned:
            return flat[:0]
        _, piece = self.owned[i]
        begin = self.plan.parameters[i].start + piece.first
        return flat[begin : begin + piece.numel]

    @property
    def prepares_grads(self) -> bool:
        return True

    @property
    def has_set_aside(self) -> bool:
        return bool(self._earlier_sums)

    def prepare(self, i: int, flags: int) -> None:
        if flags & Prepare.ZERO:
            self.buffers.drop(i)
        if flags & Prepare.SET_ASIDE:
            # The rest of the buffer is this rank's own gradient, which that sum contains already.
            self.buffers.take(i)
            self._earlier_sums[i] = self._views[i].clone()
            self.buffers.drop(i)
        if flags & Prepare.FORGET:
            self._earlier_sums.pop(i, None)
        if flags & Prepare.TAKE:
            self.grad_ready(i)

    def end_cycle(self, anywhere: Sequence[bool], reduced_before: Sequence[bool]) -> None:
        self._earlier_sums.clear()  # not earlier: a GPU may read them until the sums were waited for
        super().end_cycle(anywhere, reduced_before)

    def zero(self, params: Sequence[int]) -> None:
        for i in params:
            self._earlier_sums.pop(i, None)

    def send(
        self, buckets: range, *, cycle: int, tag: int, label: str, on_reduced: Callable[[], None] | None = None
    ) -> Work:
        shards = [self._owned_part(b) for b in buckets]
        members = [p.param for b in buckets for p in self.members[b]]
        earlier = {i: self._earlier_sums[i] for i in members if i in self._earlier_sums}
        needs_copy = len(buckets) > 1 or bool(earlier)  # the message cannot be the buffer itself

        def pack_bucket() -> tuple[WireBuffer, None]:
            return self._pack_joined(buckets, cycle) if needs_copy else self.packed(buckets, cycle), None

        def reduce_fn(chunks: Sequence[WireBuffer], _part: Part) -> None:
            if earlier:
                for shard in shards:
                    shard.fill_(-0.0)  # not 0.0: 0.0 + -0.0 is 0.0, and would lose the sum's sign
                for i, total in earlier.items():
                    self._views[i].copy_(total)
            begin = 0
            for shard in shards:
                runs = [chunk.run(begin, shard.numel()) for chunk in chunks]
                reduce_chunks(runs, shard, self._scale(), accumulate=bool(earlier), stats=self.stats)
                begin += shard.numel()
            if on_reduced is not None:
                on_reduced()

        planned = self.plan.buckets[buckets[0]]
        in_place = not needs_copy and planned.grad_comm_dtype == planned.main_grads_dtype
        on_complete = None if in_place else partial(self.temporary.give_back, buckets.start)
        return self.communicator.reduce_scatter(
            pack_bucket,
            reduce_fn,
            tag=tag,
            label=label,
            slots_needed=self._slots_needed(buckets),
            on_complete=on_complete,
        )

    def _owned_part(self, b: int) -> torch.Tensor:
        return self.buffers.buckets[b].chunk(self.communicator.world_size)[self.communicator.rank]

    def _pack_joined(self, buckets: range, cycle: int) -> WireBuffer:
        """Packs neighbouring buckets into one message."""
        flat = self.buffers.flats[self.plan.buckets[buckets[0]].buffer]
        members = self._members_of(buckets)
        begins = [self.plan.parameters[p.param].start + p.first for p in members]
        values = [flat[begin : begin + p.numel] for begin, p in zip(begins, members, strict=True)]
        return self._wire_of(buckets, values, members, cycle)

    def grad(self, i: int) -> torch.Tensor | None:
        if self.params[i].grad is None:
            return None
        self.buffers.take(i)
        return self._views[i]

    def part(self, i: int) -> torch.Tensor:
        return self._views[i]
