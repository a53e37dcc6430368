"""The exchange over gloo: every receive of a bucket, the gather's included, is posted before its first send.

gloo's own all-to-all and all-gather send first and then run half duplex as soon as ranks are not simultaneous, which is
half the link. Receives can be posted that early because nothing overtakes: rank r sends its sum only after it has all
of our part r, so the bytes that its sum overwrites in our bucket have left.

gloo writes what the socket takes while a message is posted, on the thread that posts it, and other threads of a busy
machine may hold that up: so a lane posts, not the thread that runs backward.

gloo moves the rest on threads of its own, but tells nobody when: somebody has to wait. A second lane waits for a
bucket's parts, adds them and sends the sum. For the others' sums whoever wants them waits, or a third lane where
something is to be done with them: were it the second, a rank waiting for the last sums of one bucket could not add up
the next.

Two ranks that both want the sum send each other whole buckets where that is no more bytes: each adds up all of it, and
one trip takes the place of two. The bits are the same, as a sum is a function of the wires and of the order of ranks.

Compressed messages (`comm/compression.py`) lie in memory of their own until they are expanded, or have left. So that
there is not one for every bucket of a backward, the third lane brings each to its end, and of all-gathers of weights as
many are under way as of buckets.

Buckets beyond IN_FLIGHT are started by the lane that ends an earlier one, so memory to receive into is bounded; it is
used again by the next bucket.
"""

import concurrent.futures
import ctypes
import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist

from torch_ext.comm import compression, group_calls
from torch_ext.comm.communicator import IN_FLIGHT, WHOLE, Communicator, PackFn, Part, ReduceFn
from torch_ext.comm.lost_ranks import ABANDONED, failed, refuse_failed
from torch_ext.comm.wire import WireBuffer
from torch_ext.comm.worker import WorkerThread
from torch_ext.native import library


class _Work(Protocol):
    """What gloo makes of a message, and what stands for it here."""

    def wait(self) -> object: ...

    def is_completed(self) -> bool: ...


Works = list[tuple[int, _Work]]


@functools.cache
def _trades() -> Callable[[int, int, int], int]:
    return library.function("tx_trades", *[ctypes.c_int64] * 3, restype=ctypes.c_int32, brief=True)


def _wait_once(work: _Work) -> None:
    """Also where an interrupted wait had come to its end: gloo would wait for another message then."""
    if not work.is_completed():
        work.wait()


def _wait(works: Works, communicator: "GlooCommunicator", label: str) -> None:
    """Waits for all; an error names the ranks that did not come."""
    missing: list[int] = []
    first: RuntimeError | None = None
    for peer, work in works:
        try:
            _wait_once(work)
        except RuntimeError as error:
            missing.append(peer)
            first = first or error
            # After a timeout gloo answers for the other ranks at once: those that came are told from those that did
            # not. A lost connection concerns one rank only, and others may be on their way.
            if "imed out" not in str(first):
                break
    if first is not None:
        raise failed(communicator.group, label, first, missing) from first


def _nothing() -> None: ...


class CompressedMessage:
    """A compressed one, in memory that is lent until everybody is done with it."""

    def __init__(self, values: torch.Tensor, memory: "MemoryPool") -> None:
        self.values = values
        self._pool = memory
        nbytes = compression.size(values.numel(), values.dtype)
        self._memory: torch.Tensor | None = memory.lend(nbytes, values.device)
        self.bytes = self._memory[:nbytes]
        self.users = 0

    def done(self) -> None:
        """Each user says so once. One thread at a time."""
        self.users -= 1
        if self.users <= 0 and self._memory is not None:
            self._pool.give_back(self._memory)
            self._memory = None


class PendingSend:
    """A compressed message on its way to a rank."""

    def __init__(self, message: CompressedMessage, work: _Work) -> None:
        self._message: CompressedMessage | None = message
        self._work = work
        message.users += 1

    def wait(self) -> None:
        """One thread at a time."""
        _wait_once(self._work)
        message, self._message = self._message, None
        if message is not None:
            message.done()

    def is_completed(self) -> bool:
        return self._message is None


class PendingRecv:
    """A compressed message on its way into its values."""

    def __init__(self, message: CompressedMessage, receive: Callable[[torch.Tensor], _Work]) -> None:
        self._message, self._receive = message, receive
        self._works = [receive(message.bytes)]
        self._there = False

    def wait(self) -> None:
        """Values are there afterwards. One thread at a time."""
        if self._there:  # and its memory may be another message's
            return
        _wait_once(self._works[0])
        if len(self._works) == 1 and (rest := compression.expand(self._message.bytes, self._message.values)):
            self._works.append(self._receive(compression.end_of(self._message.values, rest)))
        _wait_once(self._works[-1])
        self._there = True
        self._message.done()

    def is_completed(self) -> bool:
        return self._there


class PendingTransfer:
    """Messages on their way: receives are posted, and at the end everything is waited for by whoever asks first."""

    def __init__(self, communicator: "GlooCommunicator", tag: int, label: str) -> None:
        self.communicator, self.tag, self.label = communicator, tag, label
        self.results: list[WireBuffer] = []  # by rank: this rank's own leaves, the others' come
        self.gathers: Works = []
        self.sends: Works = []
        self._failure: str | None = None

    def receive_results(self) -> None:
        self.gathers = self.communicator.receive(self.results, self.tag + 1, self.label)

    def send_result(self) -> None:
        if self.results:
            own = self.results[self.communicator.rank]
            self.sends += self.communicator.send([own] * self.communicator.world_size, self.tag + 1, self.label)

    def arrive(self) -> None:
        """Waits; nothing of it outlives that, whoever keeps the handle. Who asks again after an error gets it again,
        and after an interrupt waits for what is still on its way."""
        if self._failure is not None:
            raise RuntimeError(self._failure)
        try:
            _wait(self.gathers, self.communicator, self.label)
            _wait(self.sends, self.communicator, self.label)
        except RuntimeError as error:
            self._failure = str(error)
            ABANDONED.append((self.gathers, self.sends, self.results))
            self.gathers, self.sends, self.results = [], [], []
            raise
        self.gathers, self.sends, self.results = [], [], []

    def __del__(self, abandoned: list[object] = ABANDONED) -> None:
        # Nobody asked (a model that went after an exception, say): gloo blocks a connection of which a message is
        # withdrawn, and what it has it moves by itself.
        if self.gathers or self.sends:
            abandoned.append((self.gathers, self.sends, self.results))

    def is_there(self) -> bool:
        return all(work.is_completed() for _, work in (*self.gathers, *self.sends))


class _Gather(PendingTransfer):
    """Needs no lane: it leaves at once, and who wants the result waits for it."""

    def __init__(self, communicator: "GlooCommunicator", result: WireBuffer, tag: int, label: str) -> None:
        super().__init__(communicator, tag, label)
        self.results = result.parts(communicator.world_size)
        self.receive_results()
        self.send_result()

    def result(self) -> None:
        self.arrive()


class _Reduction(PendingTransfer):
    """One bucket on its way to its sum."""

    def __init__(
        self,
        communicator: "GlooCommunicator",
        pack_fn: PackFn,
        reduce_fn: ReduceFn,
        tag: int,
        label: str,
        slots_needed: int,
        on_complete: Callable[[], None] | None,
    ) -> None:
        super().__init__(communicator, tag, label)
        self.slots_needed = slots_needed
        self.pack_fn: PackFn | None = pack_fn
        self.reduce_fn: ReduceFn | None = reduce_fn
        self.on_complete = on_complete
        self.parts: list[WireBuffer] = []
        self.part = Part(communicator.rank, communicator.world_size)  # that is added up here
        self.received: torch.Tensor | None = None
        self.chunks: list[WireBuffer] = []
        self.arrivals: Works = []
        self.reduced: concurrent.futures.Future[None] = concurrent.futures.Future()
        # Where something is to be done at the end, a lane does it; else whoever asks for the result waits itself.
        self.future: concurrent.futures.Future[None] | None = (
            None if on_complete is None else concurrent.futures.Future()
        )

    def start(self) -> None:
        """In the order in which buckets were given. Any thread."""
        try:
            assert self.pack_fn is not None
            communicator = self.communicator
            (wire, result), self.pack_fn = self.pack_fn(), None
            trades = communicator.trades(wire, result)
            self.parts = [wire] * communicator.world_size if trades else wire.parts(communicator.world_size)
            self.received, self.chunks = communicator.memory.take(self.parts, communicator.rank)
            self.arrivals = communicator.receive(self.chunks, self.tag, self.label)
            if trades:
                self.part = WHOLE
            elif result is not None:
                self.results = self.parts if result.data is wire.data else result.parts(communicator.world_size)
                self.receive_results()
            self.sends = communicator.send(self.parts, self.tag, self.label)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        # gloo may still write into these.
        ABANDONED.append(
            (self.arrivals, self.chunks, self.received, self.parts, self.gathers, self.results, self.sends)
        )
        self.reduced.set_exception(error)

    def reduce(self) -> None:
        """The first lane's task."""
        if not self.reduced.done():
            try:
                _wait(self.arrivals, self.communicator, self.label)
                assert self.reduce_fn is not None and self.received is not None
                if self.part == WHOLE:  # the sum may lie where the wire does
                    _wait(self.sends, self.communicator, self.label)
                    self.sends = []
                self.reduce_fn(self.chunks, self.part)
                self.communicator.memory.give_back(self.received)
                self.chunks, self.arrivals, self.received, self.reduce_fn = [], [], None, None
                self.send_result()
                self.reduced.set_result(None)
            except Exception as error:
                self._fail(error)
        if self.future is None:
            self.communicator.ended(self)

    def complete(self) -> None:
        """The second lane's task, where there is a future."""
        assert self.future is not None and self.on_complete is not None
        failure: Exception | None = None
        try:
            self._arrive()
            self.on_complete()
        except Exception as error:
            failure = error
        self.on_complete = None
        self.communicator.ended(self)
        if failure is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(failure)

    def _arrive(self) -> None:
        self.reduced.result()
        self.arrive()
        self.parts = []

    def result(self) -> None:
        if self.future is not None:
            self.future.result()
        else:
            self._arrive()

    def done(self) -> bool:
        """Whether `result` would not wait."""
        return self.future.done() if self.future is not None else self.reduced.done() and self.is_there()


class MemoryPool:
    """What buckets and messages are received into, kept for the next ones: as many memories as are used at a time. Any
    thread."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def take(self, parts: list[WireBuffer], rank: int) -> tuple[torch.Tensor, list[WireBuffer]]:
        """A chunk for every rank; this rank's own is its part, where it lies."""
        own, others = parts[rank], len(parts) - 1
        codes, scales = own.data.nbytes * others, own.scales.nbytes * others
        memory = self.lend(codes + scales, own.data.device)
        data = memory[:codes].view(own.data.dtype)
        whole = WireBuffer(data, memory[codes : codes + scales] if scales else own.scales)
        chunks = whole.parts(others) if others > 1 else [whole] * others
        chunks.insert(rank, own)
        return memory, chunks

    def lend(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """As many bytes, or more."""
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


class GlooCommunicator(Communicator):
    """See the module's first lines."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        self.can_compress = device.type == "cpu"
        # Each rank begins with its successor, so that not all of them send to rank 0 first.
        self._peers = [(self.rank + i) % self.world_size for i in range(1, self.world_size)]
        self.memory = MemoryPool()
        self.messages_memory = MemoryPool()  # of compressed ones
        self._posting = WorkerThread("torch_ext post")
        self._reducing = WorkerThread("torch_ext reduce")
        self._completing = WorkerThread("torch_ext gather")
        self._lock = threading.Lock()
        self._taken = 0  # of the IN_FLIGHT places
        self._waiting: deque[_Reduction] = deque()
        self._gathers: deque[_Gather] = deque()  # compressed ones

    def refuse_gone(self, label: str) -> None:
        refuse_failed(self.group, label)

    def borrow(self, numel: int, dtype: torch.dtype, role: str) -> WireBuffer:
        return WireBuffer.empty(numel, dtype, self.device)

    def give_back(self, wire: WireBuffer) -> None:
        """It is freed when nobody has it any more."""

    def receive(self, wires: list[WireBuffer], tag: int, label: str) -> Works:
        """Posts wires[peer] <- peer for every peer."""

        def post(peer: int) -> Iterator[_Work]:
            receive = partial(self._receive, peer, tag)
            if self._compressed(wires[peer]):
                yield PendingRecv(CompressedMessage(wires[peer].data, self.messages_memory), receive)
            else:
                yield from map(receive, wires[peer].messages())

        return self._post(post, label)

    def send(self, wires: list[WireBuffer], tag: int, label: str) -> Works:
        """Posts wires[peer] -> peer for every peer."""
        made: dict[int, tuple[CompressedMessage, int]] = {}  # by address: what all are sent is compressed once

        def post(peer: int) -> Iterator[_Work]:
            wire = wires[peer]
            if not self._compressed(wire):
                for plain in wire.messages():
                    yield group_calls.send(plain, self.group, peer, tag)
                return
            address = wire.data.data_ptr()
            if address not in made:
                message = CompressedMessage(wire.data, self.messages_memory)
                made[address] = message, compression.compress(wire.data, message.bytes)
            message, rest = made[address]
            yield PendingSend(message, group_calls.send(message.bytes, self.group, peer, tag))
            with self._lock:
                self.bytes_sent += rest
                self.messages += 1
                self.disordered += rest > 0
            if rest:
                yield group_calls.send(compression.end_of(wire.data, rest), self.group, peer, tag)

        return self._post(post, label)

    def _receive(self, peer: int, tag: int, message: torch.Tensor) -> _Work:
        return group_calls.receive(message, self.group, peer, tag)

    def _compressed(self, wire: WireBuffer) -> bool:
        return self._travels(wire) < wire.nbytes

    def _post(self, post: Callable[[int], Iterator[_Work]], label: str) -> Works:
        refuse_failed(self.group, label)
        works: Works = []
        for peer in self._peers:
            try:
                for work in post(peer):
                    works.append((peer, work))
            except RuntimeError as error:
                ABANDONED.append(works)
                raise failed(self.group, label, error, [peer]) from error
        return works

    def _start(self, reduction: _Reduction) -> None:
        """Under the lock: the lanes get buckets in the order in which they were given."""

        def post() -> None:
            reduction.start()
            self._reducing.submit(reduction.reduce)
            if reduction.future is not None:
                self._completing.submit(reduction.complete)

        self._posting.submit(post)

    def ended(self, reduction: _Reduction) -> None:
        """A bucket needs its memory no longer; the next one's turn."""
        with self._lock:
            self._taken -= reduction.slots_needed
            self._start_waiting()

    def _start_waiting(self) -> None:
        """Under the lock: as many as there are places for."""
        while self._waiting and self._taken + self._waiting[0].slots_needed <= IN_FLIGHT:
            self._taken += self._waiting[0].slots_needed
            self._start(self._waiting.popleft())

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
    ) -> "concurrent.futures.Future[None] | _Reduction":
        if isinstance(wire, WireBuffer):
            wires = self._counted(wire, result)  # now: whoever reads bytes_sent need not wait for the bucket's turn
            pack_fn: PackFn = lambda: wires  # noqa: E731
        else:
            given = wire
            pack_fn = lambda: self._counted(*given())  # noqa: E731
        if on_complete is None and self.compresses:
            on_complete = _nothing  # messages have memory of their own, which is free when a lane has been through
        reduction = _Reduction(self, pack_fn, reduce_fn, tag, label, slots_needed, on_complete)
        with self._lock:
            self._waiting.append(reduction)
            self._start_waiting()
        return reduction if reduction.future is None else reduction.future

    def trades(self, wire: WireBuffer, result: WireBuffer | None) -> bool:
        """Whether ranks send each other whole wires: instead of a half there and a half of the sum back."""
        return result is not None and bool(_trades()(self.world_size, wire.nbytes, result.nbytes))

    def _counted(self, wire: WireBuffer, result: WireBuffer | None) -> tuple[WireBuffer, WireBuffer | None]:
        with self._lock:
            if self.trades(wire, result):
                self.bytes_sent += self._travels(wire)
            else:
                self._count(wire)
                self._count(result)
        return wire, result

    def all_gather_into_buffer(self, result: WireBuffer, *, tag: int, label: str) -> _Gather:
        with self._lock:
            self._count(result)
        gather = _Gather(self, result, tag, label)
        if self._compressed(gather.results[self.rank]):  # needs memory, which is bounded like that of reductions
            self._gathers.append(gather)
            if len(self._gathers) == IN_FLIGHT:
                self._gathers.popleft().result()
        return gather

    def all_gather_bytes(self, payload: torch.Tensor, *, tag: int, label: str) -> Callable[[], list[torch.Tensor]]:
        with self._lock:
            self.bytes_sent += payload.nbytes * len(self._peers)
        gathered = [torch.empty_like(payload) for _ in range(self.world_size)]
        gathered[self.rank].copy_(payload)
        travel = PendingTransfer(self, tag, label)
        travel.gathers = self.receive([WireBuffer.of(g) for g in gathered], tag, label)
        travel.sends = self.send([WireBuffer.of(payload)] * self.world_size, tag, label)

        def wait() -> list[torch.Tensor]:
            travel.arrive()
            return gathered

        return wait
