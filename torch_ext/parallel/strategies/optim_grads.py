"""optim_grads: gradients are sharded over the ranks, too, and reduced in every backward."""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from torch_ext.comm.communicator import PackFn, Part, Work
from torch_ext.comm.wire import ParamSlice, WireBuffer, reduce_chunks
from torch_ext.parallel.cycle import OPTIM_GRADS, Prepare
from torch_ext.parallel.grad_buffers import dense_gradient, restore, widen
from torch_ext.parallel.strategies.strategy import ShardingStrategy
from torch_ext.tensors import dense
from torch_ext.tensors.storage import is_released


class ShardedGradients(ShardingStrategy):
    """optim_grads: every backward adds its sums to this rank's shard; `.grad` is None between backwards."""

    kind = OPTIM_GRADS
    can_rebuild = False  # a rebuild needs all gradients in memory at once

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        world_size, device = self.communicator.world_size, self.communicator.device
        self.shards = [
            torch.zeros(
                (buckets[-1].start + buckets[-1].numel) // world_size, dtype=buckets[-1].main_grads_dtype, device=device
            )
            for buckets in self.plan.buffers
        ]
        widen(self.params, self.plan)
        self._views = [self._owned_view(i) for i in range(len(self.params))]
        self._present = [False] * len(self.params)  # whether some rank has a gradient
        self._unsent_grads: dict[int, torch.Tensor] = {}  # gradients of buckets that were not sent yet
        self._shards_have_sums = False  # if not, the next sum overwrites the shards

    @property
    def memory(self) -> list[torch.Tensor]:
        return self.shards

    def begin_backward(self, reducing: bool) -> None:
        super().begin_backward(reducing)
        self._unsent_grads.clear()  # gradients that a backward which raised left here

    def _owned_view(self, i: int) -> torch.Tensor:
        if i not in self.owned:
            return self.shards[self.plan.parameters[i].buffer][:0]
        b, piece = self.owned[i]
        return self._owned_part(range(b, b + 1))[piece.at : piece.at + piece.numel]

    def grad_ready(self, i: int) -> None:
        param = self.params[i]
        grad, param.grad = param.grad, None
        self._unsent_grads[i] = dense_gradient(self.plan, i, grad)

    def discard(self, positions: Sequence[int]) -> None:
        for i in positions:
            self.params[i].grad = None

    def prepare(self, i: int, flags: int) -> None:
        if flags & Prepare.TAKE:  # the user assigned `.grad` between two backwards
            self.grad_ready(i)

    def grads(self, b: int) -> list[tuple[int, torch.Tensor]]:
        return [(p.param, self._unsent_grads[p.param]) for p in self.members[b] if p.param in self._unsent_grads]

    def send(
        self, buckets: range, *, cycle: int, tag: int, label: str, on_reduced: Callable[[], None] | None = None
    ) -> Work:
        members = [p for p in self._members_of(buckets) if p.param in self._unsent_grads]
        flats = {i: dense.in_order_of(self.params[i], self._unsent_grads.pop(i)) for i in {p.param for p in members}}
        values = [_piece(flats[p.param], p) for p in members]
        flats.clear()

        def pack_bucket() -> tuple[WireBuffer, None]:
            return self._wire_of(buckets, values, members, cycle), None

        # Packing now frees the gradients now. A GPU packs later, in stream order.
        pack_fn: PackFn | WireBuffer = pack_bucket if self.communicator.deferring else pack_bucket()[0]
        if not self.communicator.deferring:
            values.clear()
        accumulate, part = self._shards_have_sums, self._owned_part(buckets)

        def reduce_fn(chunks: Sequence[WireBuffer], _part: Part) -> None:
            reduce_chunks(chunks, part, self._scale(), accumulate=accumulate, stats=self.stats)
            if on_reduced is not None:
                on_reduced()

        on_complete = partial(self.temporary.give_back, buckets.start)
        return self.communicator.reduce_scatter(
            pack_fn,
            reduce_fn,
            tag=tag,
            label=label,
            slots_needed=self._slots_needed(buckets),
            on_complete=on_complete,
        )

    def _owned_part(self, buckets: range) -> torch.Tensor:
        """Returns this rank's part of neighbouring buckets: one range, since a shard has only this rank's parts."""
        first, last = self.plan.buckets[buckets[0]], self.plan.buckets[buckets[-1]]
        ends = (at // self.communicator.world_size for at in (first.start, last.start + last.numel))
        return self.shards[first.buffer][slice(*ends)]

    def end_cycle(self, anywhere: Sequence[bool], reduced_before: Sequence[bool]) -> None:
        torch.autograd.graph.increment_version(self.shards)
        self._shards_have_sums = True
        self._present = [a or b for a, b in zip(self._present, anywhere, strict=True)]

    def grad(self, i: int) -> torch.Tensor | None:
        return self._views[i] if self._present[i] else None

    def part(self, i: int) -> torch.Tensor:
        return self._views[i]

    def versions(self) -> list[int]:
        return [shard._version for shard in self.memory]

    def zero(self, params: Sequence[int]) -> None:
        for i in params:
            self._present[i] = False
        if not any(self._present):
            self._shards_have_sums = False
            return
        with torch.no_grad():
            for i in params:
                if not is_released(self._views[i]):  # offloaded memory is zero when it is allocated again
                    self._views[i].zero_()

    def release(self) -> None:
        restore(self.params, self.plan)


def _piece(flat: torch.Tensor, piece: ParamSlice) -> torch.Tensor:
    """Returns the elements of a contiguous gradient that a slice covers."""
    return flat if piece.numel == flat.numel() else flat.view(-1)[piece.first : piece.first + piece.numel]
