"""Communicators: how buckets travel between the ranks of a process group.

A reduce-scatter is an all-to-all of the parts as bytes and a sum in C (bucket_reduce_: fp32, in rank order, scaled in
fp32, rounded once to the dtype of where it goes); an all-reduce adds an all-gather of the sums. So the bits of the
result depend on no bucket size, algorithm, topology or back end, and every back end can carry every dtype, as bytes.
GlooCommunicator sends point-to-point messages, CollectiveCommunicator uses the collectives of any other back end.
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
# (reducer), when (cycle), what (bucket) and which half. Messages of one tag between two ranks arrive in order.
_OURS = 1 << 30
# Two reducers of one number on one group would take each other's messages; ranks are at most a cycle apart.
_REDUCERS, _CYCLES, MAX_BUCKETS = 512, 16, 65535
AGREEMENT_TAG = _OURS | (_OURS - 1)

IN_FLIGHT = 4
"""Buckets under way at a time, each with memory to receive into; the others are queued."""


class Part(NamedTuple):
    """Which of a bucket's equal parts."""

    number: int
    of: int


WHOLE = Part(0, 1)

ReduceFn: TypeAlias = Callable[[Sequence[WireBuffer], Part], None]
"""Adds up the ranks' chunks of a part, in rank order, and stores the sum: into that part of the result, where there is
one. Any thread."""

PackFn: TypeAlias = Callable[[], tuple[WireBuffer, WireBuffer | None]]
"""Makes the buffer that is sent, and the result (see `Communicator.reduce_scatter`), when the bucket's turn comes. Any
thread."""


class ReduceRequest(NamedTuple):
    """The arguments of `Communicator.reduce_scatter`."""

    pack_fn: PackFn
    reduce_fn: ReduceFn
    tag: int
    label: str
    slots_needed: int
    on_complete: Callable[[], None] | None


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
    """A collective that was started (concurrent.futures.Future is one)."""

    def result(self) -> None:
        """Waits until everything is received and `on_complete` has run; RuntimeError if it never will."""


class Communicator(abc.ABC):
    """One rank's end of a process group. Everything only starts, and returns a handle to wait for.

    Calls come from one thread. Every rank makes the same calls, in the same order, with the same sizes, which callers
    agree on beforehand (comm/init_sync.py): a size that differs ends a gloo process without a message.

    tag: of `tag`, unique among what is under way. label: names the call in messages.
    """

    transport_name = "torch"
    create_all_gather_group = False
    """Whether all-gathers have a communicator of their own beneath this one; the policy's."""
    can_compress = False
    """Whether `compresses` may be set."""
    compresses = False
    """Whether bf16 messages are sent compressed (`compression`). The same on every rank; set by the caller, while
    nothing is under way."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.ranks = frozenset(dist.get_process_group_ranks(group))
        """Global ranks. Kept, since a destroyed group no longer tells them."""
        self.device = device
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.ordering = Ordering(streams_of(device))
        self.bytes_sent = 0
        """Of everything that was posted so far."""

    def refuse_gone(self, label: str) -> None:
        """RuntimeError where the group is known to have failed or to be destroyed."""
        refuse(self.group, label)

    @property
    def deferring(self) -> bool:
        """Whether what is started happens later, in stream order: a PackFn's buffers are then read until the result."""
        return not self.ordering.streams.blocks

    @abc.abstractmethod
    def borrow(self, numel: int, dtype: torch.dtype, role: str) -> WireBuffer:
        """Uninitialised memory for a bucket. role: "wire" or "gathered"."""

    @abc.abstractmethod
    def give_back(self, wire: WireBuffer) -> None:
        """Frees what was borrowed. Any thread; where work is deferred, from `on_complete`."""

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
        """Starts a bucket: part r of every rank's wire goes to rank r, where reduce_fn adds them up.

        wire: numel a multiple of 128 * world_size. A PackFn makes it, and `result`, which is left out then: memory
            that exists for the transfer alone is allocated for buckets under way, not for those in the queue.
        result: makes it an all-reduce. reduce_fn puts the sum into this rank's part of it, and the other ranks' parts
            are gathered; or every rank gets the whole wires and adds up all of it. It may be `wire` itself.
        slots_needed: of the IN_FLIGHT slots, at most all. on_complete: called at the end, perhaps on another thread.

        Neither wire nor result may be touched before the handle's result.
        """
        pack_fn: PackFn = (lambda: (wire, result)) if isinstance(wire, WireBuffer) else wire
        return self._reduce(ReduceRequest(pack_fn, reduce_fn, tag, label, slots_needed, on_complete))

    @abc.abstractmethod
    def _reduce(self, request: ReduceRequest) -> Work:
        """See `reduce_scatter`."""

    @abc.abstractmethod
    def all_gather_into_buffer(self, buffer: WireBuffer, *, tag: int, label: str) -> Work:
        """Starts an all-gather in place: each rank's own part of the buffer goes to all others."""

    @abc.abstractmethod
    def all_gather_bytes(self, payload: torch.Tensor, *, tag: int, label: str) -> Callable[[], list[torch.Tensor]]:
        """Starts an all-gather of a few bytes (uint8, host memory, one size everywhere). Returns a function that waits
        and returns every rank's."""

    def _count(self, wire: WireBuffer | None) -> None:
        """Adds one half of a collective, in which every other rank is sent a part, to `bytes_sent`. Not thread-safe."""
        if wire is not None:
            self.bytes_sent += self._message_bytes(wire, self.world_size) * (self.world_size - 1)

    def _message_bytes(self, wire: WireBuffer, parts: int = 1) -> int:
        """Of one of so many parts of it, unless it is too disordered to be compressed."""
        compressed = self.compresses and compression.size(wire.data.numel() // parts, wire.data.dtype)
        return compressed or wire.nbytes // parts
