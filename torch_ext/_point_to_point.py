"""The exchange over gloo: every receive of a bucket, the gather's included, is posted before its first send.

gloo's own all-to-all and all-gather send first and then run half duplex as soon as ranks are not simultaneous, which is
half the link. Receives can be posted that early because nothing overtakes: rank r sends its sum only after it has all
of our part r, so the bytes that its sum overwrites in our bucket have left.

gloo moves the data on threads of its own, but tells nobody when: somebody has to wait. One lane waits for a bucket's
parts, adds them and sends the sum; a second one waits for the others' sums. Were it one lane, a rank waiting for the
last sums of one bucket could not add up the next.
"""

import concurrent.futures
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from torch_ext._exchange import Exchange
from torch_ext._lane import Lane

_Works = list[tuple[int, dist.Work]]

# A receive that was posted and never answered: gloo may still write into its memory, so it is never freed.
_ABANDONED: list[object] = []


def _wait(works: _Works, what: str) -> None:
    """Waits for all; an error names the ranks that did not come."""
    missing: list[int] = []
    reason = ""
    for peer, work in works:
        try:
            work.wait()
        except RuntimeError as error:
            missing.append(peer)
            reason = reason or str(error).splitlines()[0]
            # After a timeout gloo answers for the other ranks at once: those that came are told from those that did
            # not. A lost connection concerns one rank only, and others may be on their way.
            if "imed out" not in reason:
                break
    if missing:
        ranks = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(map(str, sorted(missing)))}"
        raise RuntimeError(
            f"{what}: {ranks} did not come ({reason}). The rank was lost, is more than the process group's timeout "
            "behind, or runs another program; this process group cannot be used any more."
        )


class _Reduction:
    """One bucket on its way."""

    def __init__(self, exchange: "PointToPoint", bucket: torch.Tensor, tag: int, scale: float, what: str) -> None:
        self.exchange, self.scale, self.what = exchange, scale, what
        self.tag = tag
        self.parts = list(bucket.chunk(exchange.world_size))
        self.chunks = list(torch.empty_like(bucket).chunk(exchange.world_size))
        self.future: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.reduced: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.arrivals: _Works = []
        self.sums: _Works = []
        self.sends: _Works = []

    def start(self) -> None:
        """On the caller's thread."""
        try:
            exchange = self.exchange
            self.arrivals = exchange.receive(self.chunks, self.tag, self.what)
            self.sums = exchange.receive(self.parts, self.tag + 1, self.what)
            self.sends = exchange.send(self.parts, self.tag, self.what)
            # bucket_reduce_ takes no memory that it reads and writes in one call.
            self.chunks[exchange.rank].copy_(self.parts[exchange.rank])
        except Exception:
            _ABANDONED.append(self)
            raise

    def reduce(self) -> None:
        """The first lane's task."""
        try:
            _wait(self.arrivals, self.what)
            exchange = self.exchange
            exchange.reduce_shard(self.chunks, self.parts[exchange.rank], self.scale)
            self.chunks = []
            self.sends += exchange.send([self.parts[exchange.rank]] * exchange.world_size, self.tag + 1, self.what)
            self.reduced.set_result(None)
        except Exception as error:
            _ABANDONED.append(self)
            self.reduced.set_exception(error)

    def complete(self, then: Callable[[], None] | None) -> None:
        """The second lane's task."""
        try:
            self.reduced.result()
            _wait(self.sums, self.what)
            _wait(self.sends, self.what)
            if then is not None:
                then()
            # Nothing of the bucket outlives its exchange, whoever keeps the handle.
            self.parts, self.sums, self.sends, self.arrivals = [], [], [], []
        except Exception as error:
            _ABANDONED.append(self)
            self.future.set_exception(error)
        else:
            self.future.set_result(None)


class PointToPoint(Exchange):
    """See the module's first lines."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        # Each rank begins with its successor, so that not all of them send to rank 0 first.
        self._peers = [(self.rank + i) % self.world_size for i in range(1, self.world_size)]
        self._reducing = Lane("torch_ext reduce")
        self._completing = Lane("torch_ext gather")

    def receive(self, tensors: list[torch.Tensor], tag: int, what: str) -> _Works:
        """Posts tensors[peer] <- peer for every peer."""
        return self._post(
            lambda peer: dist.irecv(_bytes(tensors[peer]), group=self.group, group_src=peer, tag=tag), what
        )

    def send(self, tensors: list[torch.Tensor], tag: int, what: str) -> _Works:
        """Posts tensors[peer] -> peer for every peer."""
        return self._post(
            lambda peer: dist.isend(_bytes(tensors[peer]), group=self.group, group_dst=peer, tag=tag), what
        )

    def _post(self, post: Callable[[int], dist.Work | None], what: str) -> _Works:
        works: _Works = []
        for peer in self._peers:
            try:
                work = post(peer)
            except RuntimeError as error:
                _ABANDONED.append(works)
                raise RuntimeError(f"{what}: rank {peer} cannot be reached ({str(error).splitlines()[0]})") from None
            assert work is not None  # None is for ranks outside of the group
            works.append((peer, work))
        return works

    def all_reduce(
        self, bucket: torch.Tensor, *, tag: int, scale: float, what: str, then: Callable[[], None] | None = None
    ) -> "concurrent.futures.Future[None]":
        self.bytes_sent += 2 * (bucket.nbytes // self.world_size) * len(self._peers)
        reduction = _Reduction(self, bucket, tag, scale, what)
        reduction.start()
        self._reducing.submit(reduction.reduce)
        self._completing.submit(partial(reduction.complete, then))
        return reduction.future

    def all_gather(self, payload: torch.Tensor, *, tag: int, what: str) -> Callable[[], list[torch.Tensor]]:
        self.bytes_sent += payload.nbytes * len(self._peers)
        gathered = [torch.empty_like(payload) for _ in range(self.world_size)]
        gathered[self.rank].copy_(payload)
        works = self.receive(gathered, tag, what)
        sends = self.send([payload] * self.world_size, tag, what)

        def wait() -> list[torch.Tensor]:
            try:
                _wait(works, what)
                _wait(sends, what)
            except RuntimeError:
                _ABANDONED.append((works, sends, gathered, payload))
                raise
            return gathered

        return wait


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)
