"""The exchange over any back end that has all-to-all and all-gather.

Collectives have no tags: the order of calls is their name. So each is issued by the thread that runs backward, the
all-to-all when a bucket is started, the rest when its result is asked for, and the caller keeps one order on all ranks.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from torch_ext._exchange import Exchange, Install, Opening
from torch_ext._wire import Wire


class _Reduction:
    """A bucket whose all-to-all is under way."""

    def __init__(
        self, exchange: Exchange, wire: Wire, install: Install, result: Wire | None, then: Callable[[], None] | None
    ) -> None:
        self.exchange, self.install, self.gathered, self.then = exchange, install, result, then
        self.received = wire.like()
        self.works: list[dist.Work] | None = [
            dist.all_to_all_single(into, sent, group=exchange.group, async_op=True)
            for into, sent in zip(self.received.messages(), wire.messages(), strict=True)
        ]

    def result(self) -> None:
        if self.works is None:
            return
        for work in self.works:
            work.wait()
        self.works = None
        self.install(self.received.parts(self.exchange.world_size))
        if self.gathered is not None:
            _gather(self.exchange, self.gathered)
        if self.then is not None:
            self.then()


class _Gathering:
    def __init__(self, exchange: Exchange, gathered: Wire) -> None:
        self.exchange = exchange
        self.gathered: Wire | None = gathered

    def result(self) -> None:
        if self.gathered is not None:
            _gather(self.exchange, self.gathered)
        self.gathered = None


def _gather(exchange: Exchange, gathered: Wire) -> None:
    own = gathered.parts(exchange.world_size)[exchange.rank]
    for into, sent in zip(gathered.messages(), own.messages(), strict=True):
        # A copy, because gather's input may not lie in its output on every back end.
        dist.all_gather_into_tensor(into, sent.clone(), group=exchange.group)


class Collectives(Exchange):
    """See the module's first lines. A timeout is reported by the back end, in its own words."""

    def reduce(
        self,
        wire: Wire | Opening,
        install: Install,
        *,
        result: Wire | None = None,
        tag: int,
        what: str,
        then: Callable[[], None] | None = None,
    ) -> _Reduction:
        if not isinstance(wire, Wire):
            wire, result = wire()
        self._count(wire)
        self._count(result)
        return _Reduction(self, wire, install, result, then)

    def gather(self, result: Wire, *, tag: int, what: str) -> _Gathering:
        self._count(result)
        return _Gathering(self, result)

    def all_gather(self, payload: torch.Tensor, *, tag: int, what: str) -> Callable[[], list[torch.Tensor]]:
        self.bytes_sent += payload.nbytes * (self.world_size - 1)
        gathered = [torch.empty_like(payload) for _ in range(self.world_size)]
        work = dist.all_gather(gathered, payload, group=self.group, async_op=True)

        def wait() -> list[torch.Tensor]:
            work.wait()
            return gathered

        return wait
