"""The all-reduce of one bucket: all-to-all of the shards as bytes, a sum in C, an all-gather.

The sum is bucket_reduce_: fp32, in rank order, scaled in fp32, rounded once to the wire's dtype. So the bits of the
result depend on no bucket size, algorithm, topology or back end, and only bytes travel, which every back end can carry
in any dtype. Two transports serve one interface: point to point (gloo) and collectives (all others).
"""

import abc
from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist

from torch_ext import _ops

# Tags of point-to-point messages: bit 30, so that a user's own small tags on the same group are never ours; then who
# (engine), when (cycle), what (bucket) and which half. Messages of one tag between two ranks arrive in order.
_OURS = 1 << 30
_ENGINES, _CYCLES, MAX_BUCKETS = 32, 256, 65535
AGREEMENT_TAG = _OURS | (_OURS - 1)


def tag(engine: int, cycle: int, bucket: int) -> int:
    """The even tag of a bucket's all-to-all; its all-gather has the odd one above. Bucket MAX_BUCKETS: the report."""
    return _OURS | (engine % _ENGINES) << 25 | (cycle % _CYCLES) << 17 | bucket << 1


def divide_factor(given: float | None, world_size: int) -> float:
    """What sums are divided by: the number of ranks where None is given. ValueError for what is no divisor."""
    factor = float(world_size if given is None else given)
    if not 0.0 < factor < float("inf"):
        raise ValueError(f"gradient_divide_factor is {given}; a finite number > 0 is legal")
    return factor


class Handle(Protocol):
    """What a started exchange returns (concurrent.futures.Future is one)."""

    def result(self) -> None:
        """Waits until the bucket holds the sum on this rank and `then` has run; RuntimeError if it never will."""


class Exchange(abc.ABC):
    """One rank's end of the exchange over one process group.

    Calls come from one thread. Every rank makes the same calls, in the same order, with the same sizes, which is the
    caller's to agree on beforehand (_agreement.py): a size that differs ends a gloo process without a message.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        # Counted when an exchange is started, for both its halves.
        self.bytes_sent = 0

    @abc.abstractmethod
    def all_reduce(
        self, bucket: torch.Tensor, *, tag: int, scale: float, what: str, then: Callable[[], None] | None = None
    ) -> Handle:
        """Starts bucket <- round((sum of all ranks' buckets, in rank order) * scale).

        bucket: flat, contiguous, numel a multiple of the world size; not to be touched before the handle's result. what
        names the bucket in messages. then runs when the sum is there, perhaps on another thread.
        """

    @abc.abstractmethod
    def all_gather(self, payload: torch.Tensor, *, tag: int, what: str) -> Callable[[], list[torch.Tensor]]:
        """Starts the exchange of a few bytes (uint8, one size everywhere); the result waits and gives every rank's."""

    def reduce_shard(self, chunks: list[torch.Tensor], shard: torch.Tensor, scale: float) -> None:
        """shard <- round(sum of chunks in rank order * scale)."""
        none = torch.empty(0, dtype=torch.int64, device=shard.device)
        _ops.call("bucket_reduce_", chunks, [], shard, none, scale, False)


def exchange_over(group: dist.ProcessGroup, device: torch.device) -> Exchange:
    """The exchange for tensors on `device` over the group: point to point where its back end there is gloo."""
    from torch_ext._collectives import Collectives
    from torch_ext._point_to_point import PointToPoint

    return (PointToPoint if backend(group, device) == "gloo" else Collectives)(group, device)


def backend(group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of the group's back end for the device ("gloo" for "cpu:gloo,cuda:nccl" and a CPU)."""
    by_device = dict(part.split(":", 1) for part in dist.get_backend_config(group).split(",") if ":" in part)
    return by_device.get(device.type, str(dist.get_backend(group)))
