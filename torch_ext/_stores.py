"""Where gradients lie between backward and step, and how a bucket of them travels: one class for each strategy.

| | no_shard, optim | optim_grads |
|---|---|---|
| a gradient came | `.grad` is a view of a flat unsharded buffer in main_grads_dtype | kept until its bucket is full |
| a bucket leaves | from the buffer, through a bucket of the wire's dtype where that differs | from such a bucket |
| its sum goes | to every rank, rounded once (no_shard); into this rank's part of the buffer (optim) | added to it |

In all three the sum is fp32, in rank order; what the optimizer reads is in main_grads_dtype.

Neighbouring buckets may travel as one (`_coalescing`). Who adds up which part of a sum that all get is nobody's
concern: under no_shard they are one bucket. Under the others a rank has its part of each, and the message is made in
memory of its own, in which each rank's parts lie side by side.
"""

import abc
from collections.abc import Callable, Sequence
from functools import partial

import torch

from torch_ext import _stats, _tensors
from torch_ext._buffers import GradientBuffers, give_back, widen
from torch_ext._exchange import IN_FLIGHT, Exchange, Handle, Opening, Part
from torch_ext._layout import BucketPlan
from torch_ext._pieces import by_rank, part_of, pieces
from torch_ext._storages import is_released
from torch_ext._temporary import TemporaryBuckets
from torch_ext._wire import CODES, Piece, Seeds, Wire, add_up, pack, unpack


class Store(abc.ABC):
    """The gradients of one engine's parameters. Positions i are the plan's, buckets b too."""

    sharded = True
    """Whether each rank steps its own parts of the parameters only."""
    movable = True
    """Whether gradients that were not sent yet can be laid out anew."""
    every_backward = False
    """Whether every backward reduces, those under no_sync() too."""

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        plan: BucketPlan,
        exchange: Exchange,
        ids: Sequence[int],
        divide_factor: float,
        gather_dtype: torch.dtype | None,
    ) -> None:
        """ids: of each parameter, for the thresholds of an 8-bit wire. gather_dtype: what no_shard gathers sums in;
        None: bf16 beside an 8-bit wire, else the wire's dtype."""
        self.params, self.plan, self.exchange, self.ids = params, plan, exchange, ids
        self.divide_factor, self.gather_dtype = divide_factor, gather_dtype
        self.temporary = TemporaryBuckets(exchange)
        self.members = [
            pieces(plan, range(b, b + 1), bucket.start, bucket.start + bucket.numel)
            for b, bucket in enumerate(plan.buckets)
        ]
        own = Part(exchange.rank, exchange.world_size)
        self.owned: dict[int, tuple[int, Piece]] = {}  # by parameter: the bucket, and the run in this rank's part
        for b in range(len(plan.buckets)):
            for piece in pieces(plan, range(b, b + 1), *part_of(plan, range(b, b + 1), own)):
                self.owned[piece.param] = (b, piece)
        self._by_rank: dict[range, list[Piece]] = {}
        self.stats = _stats.zeros(exchange.device)
        """Of what this rank's parts hold since the last reduction (sharded strategies)."""

    def moved(self, plan: BucketPlan) -> "Store":
        """A store with another plan for the same parameters, and the gradients of this one, which is done with.
        Stores that are not `movable` are not asked."""
        raise NotImplementedError

    @property
    @abc.abstractmethod
    def memory(self) -> list[torch.Tensor]:
        """Where gradients lie between backwards."""

    @property
    def adds_to_sums(self) -> bool:
        """Whether `comes` does anything."""
        return False

    # -- during backward

    def begin(self, reducing: bool) -> None:
        """A backward begins."""
        if reducing:
            self.stats.zero_()

    def in_place(self, i: int) -> bool:
        """Whether `.grad` of parameter i is where a reduction leaves it, not a tensor that somebody assigned."""
        return False

    def comes(self, i: int, reduced: bool) -> None:
        """A gradient is about to be added to that of parameter i. reduced: to what an earlier reduction left."""
        return  # not every strategy adds to it

    @abc.abstractmethod
    def came(self, i: int) -> None:
        """`.grad` of parameter i is this rank's whole gradient."""

    @abc.abstractmethod
    def absent(self, i: int, reduced: bool) -> None:
        """In a backward that reduces, nothing came for parameter i. reduced: what it has is a sum over ranks
        already."""

    @abc.abstractmethod
    def grads(self, b: int) -> list[tuple[int, torch.Tensor]]:
        """This rank's gradients of a complete bucket, with their positions."""

    @abc.abstractmethod
    def send(
        self, buckets: range, *, cycle: int, tag: int, what: str, after: Callable[[], None] | None = None
    ) -> Handle:
        """Starts the exchange of complete buckets that travel as one: neighbours in one buffer. after: called when this
        rank's parts hold the sums (sharded strategies); any thread."""

    # -- between backwards

    @abc.abstractmethod
    def closed(self, anywhere: Sequence[bool], left: Sequence[bool]) -> None:
        """A cycle ended well. anywhere: which parameters have a gradient on some rank; left: which have on every rank
        what an earlier reduction left, and nothing came for them since."""

    def written_since(self, versions: list[int]) -> list[int]:
        """Parameters that may have a gradient of this rank's own. versions: of the gradients, when they had none."""
        return []

    @abc.abstractmethod
    def unreduced(self, i: int) -> bool:
        """Whether parameter i has a gradient that is this rank's own, if one came since the last reduction."""

    @abc.abstractmethod
    def grad(self, i: int) -> torch.Tensor | None:
        """What this rank's optimizer reads of parameter i: flat, of its own part (maybe empty); None: no gradient."""

    @abc.abstractmethod
    def part(self, i: int) -> torch.Tensor:
        """Where `grad` finds it, a gradient there or not."""

    @abc.abstractmethod
    def versions(self) -> list[int]:
        """Which change when somebody writes to a gradient."""

    @abc.abstractmethod
    def zero(self, params: Sequence[int]) -> None:
        """zero_grad() of these parameters; `.grad` itself is the caller's."""

    @abc.abstractmethod
    def release(self) -> None:
        """Gives the parameters back as they were, without gradients."""

    def _wire_of(self, buckets: range, values: Sequence[torch.Tensor], members: Sequence[Piece], cycle: int) -> Wire:
        """A temporary bucket in the wire's dtype with these values."""
        numel = sum(self.plan.buckets[b].numel for b in buckets)
        wire = self.temporary.take(buckets.start, numel, self.plan.buckets[buckets[0]].grad_comm_dtype)
        pack(values, members, self.ids, wire, Seeds.of_parts(self.exchange.rank, cycle))
        return wire

    def _members_of(self, buckets: range) -> list[Piece]:
        """Where the parameters' elements lie in the message that these buckets are."""
        if buckets not in self._by_rank:
            self._by_rank[buckets] = by_rank(self.plan, buckets, self.exchange.world_size)
        return self._by_rank[buckets]

    def _places(self, buckets: range) -> int:
        """Of the IN_FLIGHT: joined buckets need more memory."""
        if len(buckets) == 1:
            return 1
        whole = len(buckets) == len(self.plan.buffers[self.plan.buckets[buckets[0]].buffer])
        return IN_FLIGHT if whole else IN_FLIGHT // 2

    def _scale(self) -> float:
        return 1.0 / self.divide_factor


class _Buffered(Store):
    """Gradients accumulate in flat, unsharded buffers of main_grads_dtype."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.buffers = GradientBuffers(self.params, self.plan)
        self._mains: dict[range, Wire] = {}

    @property
    def memory(self) -> list[torch.Tensor]:
        return self.buffers.flats

    def moved(self, plan: BucketPlan) -> "Store":
        other = type(self)(self.params, plan, self.exchange, self.ids, self.divide_factor, self.gather_dtype)
        for i, param in enumerate(self.params):
            if param.grad is not None:
                other.came(i)
        return other

    def in_place(self, i: int) -> bool:
        return self.buffers.is_ours(i)

    def came(self, i: int) -> None:
        self.buffers.take(i)

    def absent(self, i: int, reduced: bool) -> None:
        if self.params[i].grad is None:
            self.buffers.drop(i)
            return
        self.comes(i, reduced)
        self.came(i)

    def grads(self, b: int) -> list[tuple[int, torch.Tensor]]:
        return [(p.param, self.buffers.view(p.param)) for p in self.members[b]]

    def _main(self, buckets: range) -> Wire:
        """Neighbours in the buffer: where gradients accumulate."""
        main = self._mains.get(buckets)
        if main is None:
            first, last = self.plan.buckets[buckets[0]], self.plan.buckets[buckets[-1]]
            main = Wire.of(self.buffers.flats[first.buffer][first.start : last.start + last.numel])
            self._mains[buckets] = main
        return main

    def _packed(self, buckets: range, cycle: int) -> Wire:
        """Neighbours as they travel: themselves, or a temporary bucket."""
        planned, main = self.plan.buckets[buckets[0]], self._main(buckets).data
        if planned.grad_comm_dtype == planned.main_grads_dtype:
            return self._main(buckets)
        if planned.grad_comm_dtype == CODES:
            members = [
                p._replace(at=self.plan.buckets[b].start - planned.start + p.at)
                for b in buckets
                for p in self.members[b]
            ]
            return self._wire_of(buckets, [main[p.at : p.at + p.numel] for p in members], members, cycle)
        return self._wire_of(buckets, [main], [Piece(0, 0, main.numel(), 0)], cycle)

    def closed(self, anywhere: Sequence[bool], left: Sequence[bool]) -> None:
        # The exchange writes behind autograd's back.
        torch.autograd.graph.increment_version(self.buffers.flats)
        for i, has_one in enumerate(anywhere):
            if has_one:
                self.buffers.install(i)

    def written_since(self, versions: list[int]) -> list[int]:
        changed = self.versions() != versions
        return [i for i, p in enumerate(self.params) if p.grad is not None and (changed or not self.buffers.holds(i))]

    def unreduced(self, i: int) -> bool:
        return self.params[i].grad is not None

    def versions(self) -> list[int]:
        return [flat._version for flat in self.memory]

    def zero(self, params: Sequence[int]) -> None:
        """`.grad` is all there is."""

    def release(self) -> None:
        self.buffers.release()


class Replicated(_Buffered):
    """no_shard: `.grad` becomes the mean over the ranks, rounded once to the dtype in which sums are gathered."""

    sharded = False

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        # What an earlier reduction left of parameters for which nothing came: it travels, as something may have come
        # elsewhere, and travelling rounds.
        self._left: dict[int, torch.Tensor] = {}

    @property
    def adds_to_sums(self) -> bool:
        # The mean of equal gradients is the gradient.
        return self.divide_factor != self.exchange.world_size

    def comes(self, i: int, reduced: bool) -> None:
        """Counts what an earlier reduction left in `.grad` once in the next sum: rank 0 alone brings it."""
        if reduced and self.adds_to_sums:
            self.buffers.take(i)
            with torch.no_grad():
                self.buffers.view(i).mul_(self.divide_factor if self.exchange.rank == 0 else 0.0)

    def absent(self, i: int, reduced: bool) -> None:
        if reduced:
            self.buffers.take(i)
            self._left[i] = self.buffers.view(i).clone()
        super().absent(i, reduced)

    def send(
        self, buckets: range, *, cycle: int, tag: int, what: str, after: Callable[[], None] | None = None
    ) -> Handle:
        gathered = self._main(buckets)
        main = gathered.data

        def leave() -> tuple[Wire, Wire]:
            nonlocal gathered
            wire = self._packed(buckets, cycle)
            gathered = self._gathered(buckets, wire)
            return wire, gathered

        def install(chunks: Sequence[Wire], part: Part) -> None:
            own = gathered.part(*part)
            if not gathered.coded:
                add_up(chunks, own.data, self._scale())
                return
            total = torch.empty(own.data.numel(), dtype=torch.float32, device=main.device)
            add_up(chunks, total, self._scale())
            mine = pieces(self.plan, buckets, *part_of(self.plan, buckets, part))
            pack([total[p.at : p.at + p.numel] for p in mine], mine, self.ids, own, Seeds.of_sums(cycle))

        def finish() -> None:
            if gathered.data is not main:
                unpack(gathered, main)
            self.temporary.give_back(buckets.start)
            self.temporary.give_back(buckets.start, gathered=True)

        planned = self.plan.buckets[buckets[0]]
        in_place = {planned.grad_comm_dtype, self.gather_dtype or planned.grad_comm_dtype} == {planned.main_grads_dtype}
        then = None if in_place else finish
        return self.exchange.reduce(leave, install, tag=tag, what=what, places=self._places(buckets), then=then)

    def _gathered(self, buckets: range, wire: Wire) -> Wire:
        """Where the sums of all ranks come together."""
        planned, main = self.plan.buckets[buckets[0]], self._main(buckets)
        dtype = self.gather_dtype or (torch.bfloat16 if wire.coded else planned.grad_comm_dtype)
        if dtype == planned.grad_comm_dtype:
            return wire
        if dtype == planned.main_grads_dtype:
            return main
        return self.temporary.take(buckets.start, main.data.numel(), dtype, gathered=True)

    def closed(self, anywhere: Sequence[bool], left: Sequence[bool]) -> None:
        for i, before in self._left.items():
            if left[i]:
                self.buffers.view(i).copy_(before)
        self._left.clear()
        super().closed(anywhere, left)

    def grad(self, i: int) -> torch.Tensor | None:
        return self.params[i].grad

    def part(self, i: int) -> torch.Tensor:
        return self.buffers.view(i)


class OptimizerShards(_Buffered):
    """optim: the sum goes straight into this rank's part of the buffer; the rest of it keeps the local gradient."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self._views = {i: self._owned_view(i) for i in range(len(self.params))}
        self._earlier: dict[int, torch.Tensor] = {}  # sums, to which the next ones are added

    def _owned_view(self, i: int) -> torch.Tensor:
        flat = self.buffers.flats[self.plan.parameters[i].buffer]
        if i not in self.owned:
            return flat[:0]
        _, piece = self.owned[i]
        begin = self.plan.parameters[i].start + piece.first
        return flat[begin : begin + piece.numel]

    @property
    def adds_to_sums(self) -> bool:
        return True

    def comes(self, i: int, reduced: bool) -> None:
        """Sets aside what an earlier reduction left in this rank's part; elsewhere the buffer has this rank's own
        gradient, which is in that sum already."""
        if not self.in_place(i):
            self._earlier.pop(i, None)  # what somebody assigns is the whole gradient
        elif reduced:
            self.buffers.take(i)
            self._earlier[i] = self._views[i].clone()
            self.buffers.drop(i)

    def absent(self, i: int, reduced: bool) -> None:
        if self.params[i].grad is None:
            self._earlier.pop(i, None)
        super().absent(i, reduced)

    def closed(self, anywhere: Sequence[bool], left: Sequence[bool]) -> None:
        self._earlier.clear()  # not before: a device may read it until the exchange was waited for
        super().closed(anywhere, left)

    def zero(self, params: Sequence[int]) -> None:
        for i in params:
            self._earlier.pop(i, None)

    def send(
        self, buckets: range, *, cycle: int, tag: int, what: str, after: Callable[[], None] | None = None
    ) -> Handle:
        shards = [self._owned_part(b) for b in buckets]
        members = [p.param for b in buckets for p in self.members[b]]
        earlier = {i: self._earlier[i] for i in members if i in self._earlier}
        apart = len(buckets) > 1 or bool(earlier)  # the message is not the buffer

        def leave() -> tuple[Wire, None]:
            return self._joined(buckets, cycle) if apart else self._packed(buckets, cycle), None

        def install(chunks: Sequence[Wire], _part: Part) -> None:
            if earlier:
                for shard in shards:
                    shard.fill_(-0.0)  # and not 0.0, to which the sum -0.0 cannot be added
                for i, total in earlier.items():
                    self._views[i].copy_(total)
            begin = 0
            for shard in shards:
                runs = [chunk.run(begin, shard.numel()) for chunk in chunks]
                add_up(runs, shard, self._scale(), accumulate=bool(earlier), stats=self.stats)
                begin += shard.numel()
            if after is not None:
                after()

        planned = self.plan.buckets[buckets[0]]
        in_place = not apart and planned.grad_comm_dtype == planned.main_grads_dtype
        then = None if in_place else partial(self.temporary.give_back, buckets.start)
        return self.exchange.reduce(leave, install, tag=tag, what=what, places=self._places(buckets), then=then)

    def _owned_part(self, b: int) -> torch.Tensor:
        return self.buffers.buckets[b].chunk(self.exchange.world_size)[self.exchange.rank]

    def _joined(self, buckets: range, cycle: int) -> Wire:
        """Neighbours as one message."""
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


class GradientShards(Store):
    """optim_grads: every backward reduces; sums are added to this rank's shard; `.grad` is None between backwards."""

    movable = False  # all of them would have to be there at a time
    every_backward = True

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        world_size, device = self.exchange.world_size, self.exchange.device
        self.shards = [
            torch.zeros(
                (buckets[-1].start + buckets[-1].numel) // world_size, dtype=buckets[-1].main_grads_dtype, device=device
            )
            for buckets in self.plan.buffers
        ]
        widen(self.params, self.plan)
        self._views = [self._owned_view(i) for i in range(len(self.params))]
        self._present = [False] * len(self.params)  # has a gradient, on some rank
        self._held: dict[int, torch.Tensor] = {}
        self._under_way: list[tuple[Handle, int]] = []  # and its places
        self._holding = False  # whether the shards hold anything

    @property
    def memory(self) -> list[torch.Tensor]:
        return self.shards

    def begin(self, reducing: bool) -> None:
        super().begin(reducing)
        # Of a backward that raised.
        self._held.clear()
        self._under_way.clear()

    def _owned_view(self, i: int) -> torch.Tensor:
        if i not in self.owned:
            return self.shards[self.plan.parameters[i].buffer][:0]
        b, piece = self.owned[i]
        return self._owned_part(range(b, b + 1))[piece.at : piece.at + piece.numel]

    def came(self, i: int) -> None:
        param = self.params[i]
        grad, param.grad = param.grad, None
        assert grad is not None
        if grad.layout != torch.strided:
            raise RuntimeError(
                f"parameter {self.plan.parameters[i].name!r} has a sparse gradient; buckets are dense: build the layer "
                "with sparse=False"
            )
        self._held[i] = grad.detach()

    def absent(self, i: int, reduced: bool) -> None:
        grad = self.params[i].grad
        if grad is not None:  # somebody assigned it between two backwards
            self.came(i)

    def grads(self, b: int) -> list[tuple[int, torch.Tensor]]:
        return [(p.param, self._held[p.param]) for p in self.members[b] if p.param in self._held]

    def send(
        self, buckets: range, *, cycle: int, tag: int, what: str, after: Callable[[], None] | None = None
    ) -> Handle:
        members = [p for p in self._members_of(buckets) if p.param in self._held]
        flats = {i: _tensors.in_order_of(self.params[i], self._held.pop(i)) for i in {p.param for p in members}}
        values = [flats[p.param].view(-1)[p.first : p.first + p.numel] for p in members]
        flats.clear()
        # At most so many buckets exist, however slow the network is: backward waits for the oldest.
        places = self._places(buckets)
        while sum(of for _, of in self._under_way) + places > IN_FLIGHT:
            self._under_way.pop(0)[0].result()

        def leave() -> tuple[Wire, None]:
            return self._wire_of(buckets, values, members, cycle), None

        # Gradients are free as soon as they are packed, unless a device packs them later.
        opening: Opening | Wire = leave if self.exchange.deferring else leave()[0]
        if not self.exchange.deferring:
            values.clear()
        accumulate, part = self._holding, self._owned_part(buckets)

        def install(chunks: Sequence[Wire], _part: Part) -> None:
            add_up(chunks, part, self._scale(), accumulate=accumulate, stats=self.stats)
            if after is not None:
                after()

        then = partial(self.temporary.give_back, buckets.start)
        handle = self.exchange.reduce(opening, install, tag=tag, what=what, places=places, then=then)
        self._under_way.append((handle, places))
        return handle

    def _owned_part(self, buckets: range) -> torch.Tensor:
        """Of neighbours: one run, as nothing but this rank's parts lies there."""
        first, last = self.plan.buckets[buckets[0]], self.plan.buckets[buckets[-1]]
        ends = (at // self.exchange.world_size for at in (first.start, last.start + last.numel))
        return self.shards[first.buffer][slice(*ends)]

    def closed(self, anywhere: Sequence[bool], left: Sequence[bool]) -> None:
        self._under_way.clear()
        torch.autograd.graph.increment_version(self.shards)
        self._holding = True
        self._present = [a or b for a, b in zip(self._present, anywhere, strict=True)]

    def unreduced(self, i: int) -> bool:
        return self.params[i].grad is not None  # assigned by somebody

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
            self._holding = False
            return
        with torch.no_grad():
            for i in params:
                if not is_released(self._views[i]):  # what is away comes back zero
                    self._views[i].zero_()

    def release(self) -> None:
        give_back(self.params, self.plan)


STORES: dict[str, type[Store]] = {"no_shard": Replicated, "optim": OptimizerShards, "optim_grads": GradientShards}
