"""The exchange over gloo: every receive of a bucket, the gather's included, is posted before its first send.

gloo's own all-to-all and all-gather send first and then run half duplex as soon as ranks are not simultaneous, which is
half the link. Receives can be posted that early because nothing overtakes: rank r sends its sum only after it has all
of our part r, so the bytes that its sum overwrites in our bucket have left.

gloo moves the data on threads of its own, but tells nobody when: somebody has to wait. One lane waits for a bucket's
parts, adds them and sends the sum; a second one waits for the others' sums. Were it one lane, a rank waiting for the
last sums of one bucket could not add up the next.

Buckets beyond IN_FLIGHT are started by the lane that ends an earlier one, so memory to receive into is bounded; it is
used again by the next bucket.
"""

import concurrent.futures
import threading
from collections import deque
from collections.abc import Callable

import torch
import torch.distributed as dist

from torch_ext._exchange import IN_FLIGHT, Exchange, Install, Opening
from torch_ext._lane import Lane
from torch_ext._wire import Wire

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


class _Job:
    """One bucket on its way."""

    def __init__(
        self,
        exchange: "PointToPoint",
        wire: Wire | Opening | None,
        install: Install | None,
        result: Wire | None,
        tag: int,
        what: str,
        then: Callable[[], None] | None,
    ) -> None:
        self.exchange, self.install, self.then, self.tag, self.what = exchange, install, then, tag, what
        self.wire, self.result = wire, result
        self.parts: list[Wire] = []
        self.results: list[Wire] = []
        self.received: torch.Tensor | None = None
        self.chunks: list[Wire] = []
        self.future: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.reduced: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.arrivals: _Works = []
        self.gathers: _Works = []
        self.sends: _Works = []

    def start(self) -> None:
        """In the order in which jobs were given. Any thread."""
        try:
            exchange = self.exchange
            self._open()
            if self.parts:
                self.received, self.chunks = exchange.memory.take(self.parts, exchange.rank)
                self.arrivals = exchange.receive(self.chunks, self.tag, self.what)
            if self.results:
                self.gathers = exchange.receive(self.results, self.tag + 1, self.what)
            if self.parts:
                self.sends = exchange.send(self.parts, self.tag, self.what)
        except Exception as error:
            _ABANDONED.append(self)
            self.reduced.set_exception(error)

    def _open(self) -> None:
        wire, result, world_size = self.wire, self.result, self.exchange.world_size
        if wire is not None and not isinstance(wire, Wire):
            wire, result = wire()
        self.wire = self.result = None
        for one, parts in ((wire, self.parts), (result, self.results)):
            if one is not None:
                self.exchange._count(one)
                parts += one.parts(world_size)

    def reduce(self) -> None:
        """The first lane's task."""
        if self.reduced.done():
            return
        try:
            _wait(self.arrivals, self.what)
            exchange = self.exchange
            if self.install is not None:
                self.install(self.chunks)
            self.chunks = []
            if self.received is not None:
                exchange.memory.give_back(self.received)
                self.received = None
            if self.results:
                own = self.results[exchange.rank]
                self.sends += exchange.send([own] * exchange.world_size, self.tag + 1, self.what)
            self.reduced.set_result(None)
        except Exception as error:
            _ABANDONED.append(self)
            self.reduced.set_exception(error)

    def complete(self) -> None:
        """The second lane's task."""
        failure: Exception | None = None
        try:
            self.reduced.result()
            _wait(self.gathers, self.what)
            _wait(self.sends, self.what)
            if self.then is not None:
                self.then()
        except Exception as error:
            _ABANDONED.append(self)
            failure = error
        else:
            # Nothing of the bucket outlives its exchange, whoever keeps the handle.
            self.parts, self.results, self.gathers, self.sends, self.arrivals = [], [], [], [], []
            self.install = self.then = None
        self.exchange.ended()
        if failure is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(failure)


class _Memory:
    """What buckets are received into, kept for the next ones: as many memories as are used at a time. Any thread."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def take(self, parts: list[Wire], rank: int) -> tuple[torch.Tensor, list[Wire]]:
        """A chunk for every rank; this rank's own is its part, where it lies."""
        own, others = parts[rank], len(parts) - 1
        codes, scales = own.data.nbytes * others, own.scales.nbytes * others
        memory = self._fitting(codes + scales, own.data.device)
        whole = Wire(memory[:codes].view(own.data.dtype), memory[codes : codes + scales])
        chunks = whole.parts(others) if others else []
        chunks.insert(rank, own)
        return memory, chunks

    def _fitting(self, nbytes: int, device: torch.device) -> torch.Tensor:
        with self._lock:
            self._free.sort(key=torch.Tensor.numel)
            for i, memory in enumerate(self._free):
                if memory.numel() >= nbytes:
                    return self._free.pop(i)
            if self._free:  # too small: it makes room for the one that is needed
                self._free.pop()
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def give_back(self, memory: torch.Tensor) -> None:
        with self._lock:
            self._free.append(memory)


class PointToPoint(Exchange):
    """See the module's first lines."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        # Each rank begins with its successor, so that not all of them send to rank 0 first.
        self._peers = [(self.rank + i) % self.world_size for i in range(1, self.world_size)]
        self.memory = _Memory()
        self._reducing = Lane("torch_ext reduce")
        self._completing = Lane("torch_ext gather")
        self._lock = threading.Lock()
        self._under_way = 0
        self._waiting: deque[_Job] = deque()

    def receive(self, wires: list[Wire], tag: int, what: str) -> _Works:
        """Posts wires[peer] <- peer for every peer."""
        return self._post(lambda peer, m: self.group.recv([m], peer, tag), wires, what)

    def send(self, wires: list[Wire], tag: int, what: str) -> _Works:
        """Posts wires[peer] -> peer for every peer."""
        return self._post(lambda peer, m: self.group.send([m], peer, tag), wires, what)

    def _post(self, post: Callable[[int, torch.Tensor], dist.Work], wires: list[Wire], what: str) -> _Works:
        works: _Works = []
        for peer in self._peers:
            for message in wires[peer].messages():
                try:
                    work = post(peer, message)
                except RuntimeError as error:
                    _ABANDONED.append(works)
                    raise RuntimeError(
                        f"{what}: rank {peer} cannot be reached ({str(error).splitlines()[0]})"
                    ) from None
                works.append((peer, work))
        return works

    def _submit(self, job: _Job) -> "concurrent.futures.Future[None]":
        with self._lock:
            if self._under_way == IN_FLIGHT:
                self._waiting.append(job)
            else:
                self._under_way += 1
                self._start(job)
        return job.future

    def _start(self, job: _Job) -> None:
        """Under the lock: the lanes get jobs in the order in which they were given."""
        job.start()
        self._reducing.submit(job.reduce)
        self._completing.submit(job.complete)

    def ended(self) -> None:
        """A job ended, well or not; the next one's turn."""
        with self._lock:
            if self._waiting:
                self._start(self._waiting.popleft())
            else:
                self._under_way -= 1

    def reduce(
        self,
        wire: Wire | Opening,
        install: Install,
        *,
        result: Wire | None = None,
        tag: int,
        what: str,
        then: Callable[[], None] | None = None,
    ) -> "concurrent.futures.Future[None]":
        return self._submit(_Job(self, wire, install, result, tag, what, then))

    def gather(self, result: Wire, *, tag: int, what: str) -> "concurrent.futures.Future[None]":
        return self._submit(_Job(self, None, None, result, tag, what, None))

    def all_gather(self, payload: torch.Tensor, *, tag: int, what: str) -> Callable[[], list[torch.Tensor]]:
        with self._lock:
            self.bytes_sent += payload.nbytes * len(self._peers)
        gathered = [torch.empty_like(payload) for _ in range(self.world_size)]
        gathered[self.rank].copy_(payload)
        works = self.receive([Wire.of(g) for g in gathered], tag, what)
        sends = self.send([Wire.of(payload)] * self.world_size, tag, what)

        def wait() -> list[torch.Tensor]:
            try:
                _wait(works, what)
                _wait(sends, what)
            except RuntimeError:
                _ABANDONED.append((works, sends, gathered, payload))
                raise
            return gathered

        return wait
