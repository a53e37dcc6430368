"""Communicators send and reduce buckets between the ranks of a process group.

A reduce-scatter is an all-to-all of the parts as bytes, and a sum in C (bucket_reduce_: in fp32, in rank order, scaled
in fp32, rounded once to the result's dtype). An all-reduce adds an all-gather of the sums. So the bits of the result do
not depend on bucket size, algorithm, topology or back end, and every back end can send every dtype, as bytes.
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

# Tags of point-to-point messages. Bit 30 keeps them apart from a user's own small tags on the same group. The other
# bits are the reducer, the cycle, the bucket, and whether it is an all-to-all or an all-gather. Messages with one tag
# between two ranks arrive in order.
_OURS = 1 << 30
# Both numbers wrap around. Two reducers with one number on one group would receive each other's messages. Ranks are at
# most one cycle apart.
_REDUCERS, _CYCLES, MAX_BUCKETS = 512, 16, 65535
AGREEMENT_TAG = _OURS | (_OURS - 1)

IN_FLIGHT = 4
"""How many buckets may be exchanged at a time, each with its receive buffers; further buckets are queued."""


class Part(NamedTuple):
    """One of a bucket's equal parts."""

    number: int
    of: int


WHOLE = Part(0, 1)

ReduceFn: TypeAlias = Callable[[Sequence[WireBuffer], Part], None]
"""A function that adds up the ranks' chunks of a part, in rank order, and stores the sum: in this part of the result
buffer, if there is one. Called on any thread."""

PackFn: TypeAlias = Callable[[], tuple[WireBuffer, WireBuffer | None]]
"""A function that creates the send buffer, and the result buffer (see `Communicator.reduce_scatter`), when the bucket's
turn comes. Called on any thread."""


class ReduceRequest(NamedTuple):
    """The arguments of `Communicator.reduce_scatter`."""

    pack_fn: PackFn
    reduce_fn: ReduceFn
    tag: int
    label: str
    slots_needed: int
    on_complete: Callable[[], None] | None


def tag(reducer: int, cycle: int, bucket: int) -> int:
    """Returns the tag of a bucket's all-to-all, an even number; the all-gather's is one more. Bucket MAX_BUCKETS stands
    for the ranks' report."""
    return _OURS | (reducer % _REDUCERS) << 21 | (cycle % _CYCLES) << 17 | bucket << 1


def divide_factor(given: float | None, world_size: int) -> float:
    """Returns the divisor of sums: the given one, or the number of ranks for None. Raises ValueError unless it is
    finite and positive."""
    factor = float(world_size if given is None else given)
    if not 0.0 < factor < float("inf"):
        raise ValueError(f"gradient_divide_factor is {given}; a finite number > 0 is legal")
    return factor


class Work(Protocol):
    """A started collective. concurrent.futures.Future fits this protocol."""

    def result(self) -> None:
        """Waits until everything is received and `on_complete` has run. Raises RuntimeError if that failed."""


class Communicator(abc.ABC):
    """One rank's end of a process group. Calls only start an operation and return a handle to wait for it.

    Calls come from one thread. Every rank makes the same calls, in the same order, with the same sizes, which callers
    agree on beforehand (comm/init_sync.py): a differing size would terminate a gloo process without a message.

    tag: from the function `tag`, unique among running operations. label: names the call in messages.
    """

    transport_name = "torch"
    create_all_gather_group = False
    """Whether all-gathers use a communicator of their own beneath this one (a field of the policy)."""
    can_compress = False
    """Whether `compresses` may be set."""
    compresses = False
    """Whether bf16 messages are sent compressed (`compression`). The same on every rank; set by the caller, while no
    operation is running."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.ranks = frozenset(dist.get_process_group_ranks(group))
        """Global ranks. Stored, since a destroyed group has no ranks any more."""
        self.device = device
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.ordering = Ordering(streams_of(device))
        self.bytes_sent = 0
        """Bytes of all messages that were posted so far."""

    def check_process_group(self, label: str) -> None:
        """Raises RuntimeError if the group is known to have failed or to be destroyed."""
        refuse(self.group, label)

    @property
    def deferring(self) -> bool:
        """Whether operations run later, in stream order. A PackFn's buffers are then read until the handle's result."""
        return not self.ordering.streams.blocks

    @abc.abstractmethod
    def borrow(self, numel: int, dtype: torch.dtype, role: str) -> WireBuffer:
        """Returns uninitialised memory for a bucket. role: "wire" or "gathered"."""

    @abc.abstractmethod
    def give_back(self, wire: WireBuffer) -> None:
        """Frees memory from `borrow`. Callable on any thread; if `deferring`, it must be called from `on_complete`."""

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
        """Starts the reduce-scatter of a bucket: part r of every rank's wire is sent to rank r, where reduce_fn adds
        the parts up.

        wire: the send buffer; its numel is a multiple of 128 * world_size. Or a PackFn that creates it, together with
            `result`, which is not passed then. With a PackFn, memory that exists only for the transfer is allocated for
            running buckets only, not for queued ones.
        result: if given, this is an all-reduce. reduce_fn writes the sum to this rank's part of `result`, and the other
            parts are gathered; or every rank receives the whole wires and computes all of `result`. May be `wire`.
        slots_needed: how many of the IN_FLIGHT slots the bucket takes, at most all. on_complete: called at the end,
            perhaps on another thread.

        Neither wire nor result may be used before the handle's result.
        """
        pack_fn: PackFn = (lambda: (wire, result)) if isinstance(wire, WireBuffer) else wire
        return self._reduce(ReduceRequest(pack_fn, reduce_fn, tag, label, slots_needed, on_complete))

    @abc.abstractmethod
    def _reduce(self, request: ReduceRequest) -> Work:
        """Implements `reduce_scatter`."""

    @abc.abstractmethod
    def all_gather_into_buffer(self, buffer: WireBuffer, *, tag: int, label: str) -> Work:
        """Starts an all-gather in place: each rank's own part of the buffer is sent to all other ranks."""

    @abc.abstractmethod
    def all_gather_bytes(self, payload: torch.Tensor, *, tag: int, label: str) -> Callable[[], list[torch.Tensor]]:
        """Starts an all-gather of a few bytes (uint8, host memory, the same size on all ranks). Returns a function that
        waits, and returns the bytes of every rank."""

    def _count(self, wire: WireBuffer | None) -> None:
        """Adds to `bytes_sent` the bytes of sending each other rank one part of the wire. Not thread-safe."""
        if wire is not None:
            self.bytes_sent += self._message_bytes(wire, self.world_size) * (self.world_size - 1)

    def _message_bytes(self, wire: WireBuffer, parts: int = 1) -> int:
        """Returns the bytes that are sent for one of the wire's parts. Excludes the uncompressed rest that a compressed
        message may be followed by."""
        compressed = self.compresses and compression.size(wire.data.numel() // parts, wire.data.dtype)
        return compressed or wire.nbytes // parts
