"""What the link's speed decides about planned buckets: which neighbours are sent as one message, and whether messages
are compressed (tx_coalesce and tx_compresses in C). The gradients' bits depend on neither."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from torch_ext.comm import compression, link
from torch_ext.comm.communicator import Communicator
from torch_ext.comm.wire import WireBuffer
from torch_ext.native import library, structs
from torch_ext.policy.policy import Policy


@structs.mirror("tx_coalesce_args")
class _Args(library.Struct):
    """The arguments of tx_coalesce: buckets and link."""


@dataclass(frozen=True)
class PlannedBucket:
    """A bucket: elements [start, start + numel) of its buffer. The first `used` of them belong to parameters.

    `start` and `numel` are multiples of 128 times the number of ranks.
    """

    buffer: int
    start: int
    numel: int
    used: int
    main_grads_dtype: torch.dtype
    grad_comm_dtype: torch.dtype


class Messages(NamedTuple):
    """How a plan's buckets are sent, the same on every rank."""

    link_gbps: float | None = None
    """The speed of a rank's link, in Gbit/s; None: not known, or nothing depends on it."""
    compressed: bool = False
    """Whether bf16 messages are compressed."""
    ends: tuple[int, ...] = ()
    """For each message, the bucket after its last one."""

    def lines(self) -> list[str]:
        """Returns the decision as text; no line if nothing was decided."""
        if self.link_gbps is None:
            return []
        runs = zip((0, *self.ends), self.ends, strict=False)
        joined = [f"{first} to {end - 1}" for first, end in runs if end - first > 1]
        how = f"buckets {', '.join(joined)} are sent as one message each" if joined else "each bucket is a message"
        return [f"link of {self.link_gbps:.3g} Gbit/s: {how}{', compressed' * self.compressed}"]


def link_gbps(depends: bool, policy: Policy, communicator: Communicator, number: int, caller: str) -> float | None:
    """Returns what a rank's link carries, in Gbit/s: the policy's value, or one that is measured here. Every rank calls
    it and gets the same. None if nothing depends on it: on devices that send in stream order each bucket is a message.
    depends: equal on every rank. number: from `agree`."""
    if communicator.deferring or not depends:
        return None
    return policy.link_gbps or link.measure(communicator, number, caller)


def depends_on_link(buckets: Sequence[PlannedBucket], world_size: int, policy: Policy) -> bool:
    """Whether the messages of these buckets depend on the link's speed."""
    compresses = policy.grad_comm_compression == "auto" and any(
        compression.size(b.numel // world_size, b.grad_comm_dtype) for b in buckets
    )
    return world_size > 1 and (compresses or (policy.bucket_size is None and len(buckets) > 1))


def decide(
    buckets: Sequence[PlannedBucket], world_size: int, policy: Policy, link_gbps: float | None, strategy: str
) -> Messages:
    """Returns the messages for these buckets. link_gbps: per rank; None: not known, so that each bucket is a message.
    strategy: its name."""
    n = len(buckets)
    if not depends_on_link(buckets, world_size, policy):
        link_gbps = None
    compressed = compression.is_on(policy, link_gbps)
    if link_gbps is None or policy.bucket_size is not None:  # a bucket_size set by the user is kept
        return Messages(link_gbps, compressed, tuple(range(1, n + 1)))
    numbers = ctypes.c_int64 * max(1, n)
    args = _Args(
        size=ctypes.sizeof(_Args),
        n_buckets=n,
        bytes=numbers(*(_size_of(b, compressed) for b in buckets)),
        buffer=numbers(*(b.buffer for b in buckets)),
        world=world_size,
        link_gbps=link_gbps,
        compressed=compressed,
        sharded=strategy != "no_shard",
    )
    ends, n_messages, int64s = numbers(), ctypes.c_int64(), ctypes.POINTER(ctypes.c_int64)
    coalesce = library.function("tx_coalesce", ctypes.POINTER(_Args), int64s, int64s)
    coalesce(ctypes.byref(args), ends, ctypes.byref(n_messages))
    return Messages(link_gbps, compressed, tuple(ends[: n_messages.value]))


def _size_of(bucket: PlannedBucket, compressed: bool) -> int:
    """Returns the bytes of a bucket as it is sent."""
    uncompressed = WireBuffer.size_of(bucket.numel, bucket.grad_comm_dtype)
    return (compressed and compression.size(bucket.numel, bucket.grad_comm_dtype)) or uncompressed
