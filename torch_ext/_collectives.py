"""The exchange over any back end that has all-to-all and all-gather.

Collectives have no tags: the order of calls is their name. So each is issued by the thread that runs backward, the
all-to-all when a bucket is started, the rest when its result is asked for, and the caller keeps one order on all ranks.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from torch_ext._exchange import Exchange


class _Reduction:
    """A bucket whose all-to-all is under way."""

    def __init__(self, exchange: Exchange, bucket: torch.Tensor, scale: float, then: Callable[[], None] | None) -> None:
        self.exchange, self.bucket, self.scale, self.then = exchange, bucket, scale, then
        self.received = torch.empty_like(bucket)
        self.work = dist.all_to_all_single(
            self.received.view(torch.uint8), bucket.view(torch.uint8), group=exchange.group, async_op=True
        )

    def result(self) -> None:
        """Once."""
        self.work.wait()
        exchange = self.exchange
        shard = self.bucket.chunk(exchange.world_size)[exchange.rank]
        exchange.reduce_shard(list(self.received.chunk(exchange.world_size)), shard, self.scale)
        # A copy, because gather's input may not lie in its output on every back end; received is free by now.
        own = self.received[: shard.numel()].copy_(shard)
        dist.all_gather_into_tensor(self.bucket.view(torch.uint8), own.view(torch.uint8), group=exchange.group)
        if self.then is not None:
            self.then()


class Collectives(Exchange):
    """See the module's first lines. A timeout is reported by the back end, in its own words."""

    def all_reduce(
        self, bucket: torch.Tensor, *, tag: int, scale: float, what: str, then: Callable[[], None] | None = None
    ) -> _Reduction:
        self.bytes_sent += 2 * (bucket.nbytes // self.world_size) * (self.world_size - 1)
        return _Reduction(self, bucket, scale, then)

    def all_gather(self, payload: torch.Tensor, *, tag: int, what: str) -> Callable[[], list[torch.Tensor]]:
        self.bytes_sent += payload.nbytes * (self.world_size - 1)
        gathered = [torch.empty_like(payload) for _ in range(self.world_size)]
        work = dist.all_gather(gathered, payload, group=self.group, async_op=True)

        def wait() -> list[torch.Tensor]:
            work.wait()
            return gathered

        return wait
