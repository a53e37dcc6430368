"""How buckets travel: an all-to-all of the parts as bytes, a sum in C, an all-gather of the sums.

The sum is bucket_reduce_: fp32, in rank order, scaled in fp32, rounded once to the dtype of where it goes. So the bits
of the result depend on no bucket size, algorithm, topology or back end, and only bytes travel, which every back end can
carry in any dtype. Two transports serve one interface: point to point (gloo) and collectives (all others).
"""

import abc
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import torch
import torch.distributed as dist

from torch_ext.comm import compression
from torch_ext.comm.lost_ranks import refuse
from torch_ext.comm.streams import Ordering, streams_of
from torch_ext.comm.wire import WireBuffer

# Tags of point-to-point messages: bit 30, so that a user's own small tags on the same group are never ours; then who
# (engine), when (cycle), what (bucket) and which half. Messages of one tag between two ranks arrive in order.
_OURS = 1 << 30
# Two engines of one number on one group would take each other's messages; ranks are at most a cycle apart.
_REDUCERS, _CYCLES, MAX_BUCKETS = 512, 16, 65535
AGREEMENT_TAG = _OURS | (_OURS - 1)

IN_FLIGHT = 4
"""Buckets that are under way at a time, each with memory to receive into; the others wait for their turn."""


class Part(NamedTuple):
    """Which of a bucket's equal parts."""

    number: int
    of: int


WHOLE = Part(0, 1)

ReduceFn: TypeAlias = Callable[[Sequence[WireBuffer], Part], None]
"""Adds up the chunks that came, by rank, and puts the sum where it belongs: into this part of the result, where there
is one. Any thread."""

PackFn: TypeAlias = Callable[[], tuple[WireBuffer, WireBuffer | None]]
"""Makes the wire that leaves, and where sums are gathered (see `reduce`), when the bucket's turn comes. Any thread."""


def tag(reducer: int, cycle: int, bucket: int) -> int:
    """The even tag of a bucket's all-to-all; its all-gather has the odd one above. Bucket MAX_BUCKETS: the report."""
    return _OURS | (reducer % _REDUCERS) << 21 | (cycle % _CYCLES) << 17 | bucket << 1


def divide_factor(given: float | None, world_size: int) -> float:
    """What sums are divided by: the number of ranks where None is given. ValueError for what is no divisor."""
    factor = float(world_size if given is None else given)
    if not 0.0 < factor < float("inf"):
        raise ValueError(f"gradient_divide_factor is {given}; a finite number > 0 is legal")
    return factor


class Work(Protocol):
    """What a started exchange returns (concurrent.futures.Future is one)."""

    def result(self) -> None:
        """Waits until everything has arrived and `then` has run; RuntimeError if it never will."""


class Communicator(abc.ABC):
    """One rank's end of the exchange over one process group.

    Calls come from one thread. Every rank makes the same calls, in the same order, with the same sizes, which is the
    caller's to agree on beforehand (comm/init_sync.py): a size that differs ends a gloo process without a message.
    """

    transport_name = "torch"
    can_compress = False
    """Whether `compresses` may be set."""
    compresses = False
    """Whether bf16 messages travel compressed (`compression`). The same on every rank; set by the caller, while
    nothing is on its way."""
    messages = disordered = 0
    """That were to be compressed so far, and those of them that it was of no use for."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.ranks = frozenset(dist.get_process_group_ranks(group))
        """As the whole job numbers them. Kept: a group that was destroyed is not known any more."""
        self.device = device
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.ordering = Ordering(streams_of(device))
        # Counted when an exchange is started, for both its halves.
        self.bytes_sent = 0

    def refuse_gone(self, label: str) -> None:
        """RuntimeError where nothing can be exchanged any more, as it is known."""
        refuse(self.group, label)

    @property
    def deferring(self) -> bool:
        """Whether what is started happens later, in the order of streams: an Opening then reads memory until the
        result."""
        return not self.ordering.streams.blocks

    @abc.abstractmethod
    def borrow(self, numel: int, dtype: torch.dtype, role: str) -> WireBuffer:
        """Memory for a bucket that travels, of no particular content. role: "wire" or "gathered"."""

    @abc.abstractmethod
    def give_back(self, wire: WireBuffer) -> None:
        """What was borrowed. Any thread; where work is deferred, from `then`."""

    @abc.abstractmethod
    def reduce_scatter(
        self,
        wire: WireBuffer | PackFn,
        reduce_fn: ReduceFn,
        *,
        result: WireBuffer | None = None,
        tag: int,
        label: str,
        slots_needed: int = 1,
        on_complete: Callable[[], None] | None = None,
    ) -> Work:
        """Starts a bucket: part r of every rank's wire comes to rank r, where `install` adds up; a reduce-scatter.

        result: where `install` puts the sum into this rank's part; the other parts come from the other ranks then: an
        all-reduce. Or every rank gets the whole wires and adds up all of it. It may be `wire` itself. wire: numel a
        multiple of 128 * world_size. Nothing of both is to be touched before the handle's result. An Opening makes both
        (`result` is left out then): memory that exists for the travel alone is made for buckets that are under way, not
        for those that wait. what names the bucket in messages. places: how many of the IN_FLIGHT it takes, at most all.
        then runs at the end, perhaps on another thread.
        """

    @abc.abstractmethod
    def all_gather_into_buffer(self, result: WireBuffer, *, tag: int, label: str) -> Work:
        """Starts an all-gather in place: each rank brings its own part of `result` and gets the others'."""

    @abc.abstractmethod
    def all_gather_bytes(self, payload: torch.Tensor, *, tag: int, label: str) -> Callable[[], list[torch.Tensor]]:
        """Starts the exchange of a few bytes (uint8, host memory, one size everywhere); the result waits and gives
        every rank's."""

    def _count(self, wire: WireBuffer | None) -> None:
        """A half of an exchange: every other rank is sent a part. One thread at a time."""
        if wire is not None:
            self.bytes_sent += self._travels(wire, self.world_size) * (self.world_size - 1)

    def _travels(self, wire: WireBuffer, parts: int = 1) -> int:
        """Bytes that are sent for one of so many parts of it, unless it is too disordered to be compressed."""
        compressed = self.compresses and compression.size(wire.data.numel() // parts, wire.data.dtype)
        return compressed or wire.nbytes // parts
