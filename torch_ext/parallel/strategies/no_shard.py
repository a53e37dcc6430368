"""no_shard: nothing is cut over the ranks; every rank gets the mean gradient, rounded once to the wire dtype."""

from collections.abc import Callable, Sequence

import torch

from torch_ext.comm.communicator import Part, Work
from torch_ext.comm.wire import RoundingSeeds, WireBuffer, pack, reduce_chunks, unpack
from torch_ext.parallel.bucket_plan import part_of, pieces
from torch_ext.parallel.strategies.strategy import _Buffered


class NoShard(_Buffered):
    """no_shard: `.grad` becomes the mean over the ranks, rounded once to the dtype in which sums are gathered."""

    sharded = False

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        # What an earlier reduction left of parameters for which nothing came: it travels, as something may have come
        # elsewhere, and travelling rounds.
        self._reduced_before: dict[int, torch.Tensor] = {}

    @property
    def adds_to_sums(self) -> bool:
        # The mean of equal gradients is the gradient.
        return self.divide_factor != self.communicator.world_size

    def before_accumulate(self, i: int, reduced: bool) -> None:
        """Counts what an earlier reduction left in `.grad` once in the next sum: rank 0 alone brings it."""
        if reduced and self.adds_to_sums:
            self.buffers.take(i)
            with torch.no_grad():
                self.buffers.view(i).mul_(self.divide_factor if self.communicator.rank == 0 else 0.0)

    def grad_missing(self, i: int, reduced: bool) -> None:
        if reduced:
            self.buffers.take(i)
            self._reduced_before[i] = self.buffers.view(i).clone()
        super().grad_missing(i, reduced)

    def send(
        self, buckets: range, *, cycle: int, tag: int, label: str, on_reduced: Callable[[], None] | None = None
    ) -> Work:
        gathered = self._main(buckets)
        main = gathered.data

        def pack_bucket() -> tuple[WireBuffer, WireBuffer]:
            nonlocal gathered
            wire = self._packed(buckets, cycle)
            gathered = self._gathered(buckets, wire)
            return wire, gathered

        def reduce_fn(chunks: Sequence[WireBuffer], part: Part) -> None:
            own = gathered.part(*part)
            if not gathered.coded:
                reduce_chunks(chunks, own.data, self._scale())
                return
            total = torch.empty(own.data.numel(), dtype=torch.float32, device=main.device)
            reduce_chunks(chunks, total, self._scale())
            mine = pieces(self.plan, buckets, *part_of(self.plan, buckets, part))
            pack([total[p.at : p.at + p.numel] for p in mine], mine, self.ids, own, RoundingSeeds.of_sums(cycle))

        def unpack_sums() -> None:
            if gathered.data is not main:
                unpack(gathered, main)
            self.temporary.give_back(buckets.start)
            self.temporary.give_back(buckets.start, gathered=True)

        planned = self.plan.buckets[buckets[0]]
        in_place = {planned.grad_comm_dtype, self.gather_dtype or planned.grad_comm_dtype} == {planned.main_grads_dtype}
        on_complete = None if in_place else unpack_sums
        return self.communicator.reduce_scatter(
            pack_bucket,
            reduce_fn,
            tag=tag,
            label=label,
            slots_needed=self._slots_needed(buckets),
            on_complete=on_complete,
        )

    def _gathered(self, buckets: range, wire: WireBuffer) -> WireBuffer:
        """Where the sums of all ranks come together."""
        planned, main = self.plan.buckets[buckets[0]], self._main(buckets)
        dtype = self.gather_dtype or (torch.bfloat16 if wire.coded else planned.grad_comm_dtype)
        if dtype == planned.grad_comm_dtype:
            return wire
        if dtype == planned.main_grads_dtype:
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

    def part(self, i: int) -> torch.Tensor:
        return self.buffers.view(i)
