"""no_shard: nothing is sharded; every rank gets the mean gradient, rounded once to the dtype of gathered sums."""

from collections.abc import Callable, Sequence

import torch

from torch_ext.comm.communicator import Work
from torch_ext.comm.wire import WireBuffer, gather_dtype, unpack
from torch_ext.parallel.bucket_mean import BucketMean
from torch_ext.parallel.cycle import NO_SHARD, Prepare
from torch_ext.parallel.strategies.strategy import BufferedStrategy


class NoShard(BufferedStrategy):
    """no_shard: `.grad` becomes the mean over the ranks, rounded once to the dtype in which sums are gathered."""

    kind = NO_SHARD
    sharded = False

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        # Copies of earlier means, for parameters without a gradient in this cycle. Their range is sent nevertheless,
        # since another rank may have a gradient, and sending rounds the mean: `end_cycle` restores the copy.
        self._reduced_before: dict[int, torch.Tensor] = {}

    @property
    def prepares_grads(self) -> bool:
        # An earlier mean is equal on all ranks. If sums are divided by the number of ranks, the next mean contains it
        # once without any preparation.
        return self.divide_factor != self.communicator.world_size

    def prepare(self, i: int, flags: int) -> None:
        if flags & Prepare.COPY | flags & Prepare.MULTIPLY:
            self.buffers.take(i)
        if flags & Prepare.COPY:
            self._reduced_before[i] = self.buffers.view(i).clone()
        if flags & Prepare.MULTIPLY:
            with torch.no_grad():
                self.buffers.view(i).mul_(self.divide_factor if self.communicator.rank == 0 else 0.0)
        if flags & Prepare.ZERO:
            self.buffers.drop(i)
        if flags & Prepare.TAKE:
            self.grad_ready(i)

    def send(
        self, buckets: range, *, cycle: int, tag: int, label: str, on_reduced: Callable[[], None] | None = None
    ) -> Work:
        bucket = _Bucket(self, buckets, cycle)
        planned = self.plan.buckets[buckets[0]]
        dtypes = {planned.grad_comm_dtype, gather_dtype(self.gather_dtype, planned.grad_comm_dtype)}
        in_place = dtypes == {planned.main_grads_dtype}
        return self.communicator.reduce_scatter(
            bucket.pack,
            bucket.reduce,
            tag=tag,
            label=label,
            slots_needed=self._slots_needed(buckets),
            on_complete=None if in_place else bucket.unpack,
        )

    def gathered(self, buckets: range, wire: WireBuffer) -> WireBuffer:
        """Returns the buffer into which the ranks' parts of the sum are all-gathered. wire: the packed message."""
        main, dtype = self.main(buckets), gather_dtype(self.gather_dtype, wire.data.dtype)
        if dtype == wire.data.dtype:
            return wire
        if dtype == main.data.dtype:
            return main
        return self.temporary.take(buckets.start, main.data.numel(), dtype, gathered=True)

    def end_cycle(self, anywhere: Sequence[bool], reduced_before: Sequence[bool]) -> None:
        for i, before in self._reduced_before.items():
            if reduced_before[i]:
                self.buffers.view(i).copy_(before)
        self._reduced_before.clear()
        super().end_cycle(anywhere, reduced_before)

    def grad(self, i: int) -> torch.Tensor | None:
        return self.params[i].grad


class _Bucket(BucketMean):
    """One message: a bucket, or neighbouring buckets that are sent together."""

    def __init__(self, strategy: NoShard, buckets: range, cycle: int) -> None:
        super().__init__(strategy.slices(buckets), strategy.ids, strategy.divide_factor, cycle)
        self._strategy, self._buckets, self._cycle = strategy, buckets, cycle
        self.gathered = self._main = strategy.main(buckets)

    def pack(self) -> tuple[WireBuffer, WireBuffer]:
        """PackFn: returns the message, and the buffer that sums are gathered into. Called on any thread."""
        wire = self._strategy.packed(self._buckets, self._cycle)
        self.gathered = self._strategy.gathered(self._buckets, wire)
        return wire, self.gathered

    def unpack(self) -> None:
        """Called on any thread when all parts are gathered: copies them to the buffer, frees temporary memory."""
        if self.gathered.data is not self._main.data:
            unpack(self.gathered, self._main.data)
        self._strategy.temporary.give_back(self._buckets.start)
        self._strategy.temporary.give_back(self._buckets.start, gathered=True)
