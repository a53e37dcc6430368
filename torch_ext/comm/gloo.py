"""The communicator over gloo's point-to-point messages. Its worker threads post, reduce and gather queued buckets.

Note [gloo's order and threads]

gloo's own all-to-all and all-gather send before they receive. As soon as ranks are not in step they run half duplex,
which halves the bandwidth. Here every receive of a bucket, including those of its all-gather, is posted before its
first send. Receiving a sum into the send buffer that early is safe: rank r sends its sum only after it has received all
of our part r, so the bytes that the sum overwrites have been sent.

Three worker threads per communicator keep the thread of backward from waiting:

- "post" posts a bucket's messages. gloo writes to the socket on the posting thread, which may be delayed by other
  threads of a busy machine.
- "reduce" waits for a bucket's chunks, adds them up and sends the sum. gloo transfers bytes on its own threads but has
  no callbacks, so a thread has to wait.
- "gather" waits for the other ranks' sums if an on_complete has to run. If "reduce" did that, a rank that waits for the
  last sums of one bucket could not add up the next one. Without an on_complete, the caller of `result` waits.

A bucket takes slots_needed of IN_FLIGHT slots. Buckets without a slot are queued, and started by the thread that
finishes an earlier one. So the memory of receive buffers is bounded, and reused by the next bucket.

In an all-reduce between two ranks, each sends the other its whole bucket if that is fewer bytes (tx_trades), and adds
up all of it. The bits are the same: a sum is a function of the chunks in rank order.

Compressed messages (`comm/compression.py`) need memory of their own until they are sent or expanded. To bound it, the
"gather" thread finishes every compressed bucket, and at most IN_FLIGHT compressed all-gathers of weights are running.
"""

import concurrent.futures
import ctypes
import functools
import weakref
from collections import deque
from collections.abc import Callable

import torch
import torch.distributed as dist

from torch_ext.comm import lost_ranks
from torch_ext.comm.communicator import IN_FLIGHT, WHOLE, Part, ReduceRequest
from torch_ext.comm.gloo_p2p import MemoryPool, PeerMessages, PendingTransfer, Works
from torch_ext.comm.lost_ranks import ABANDONED, refuse_failed
from torch_ext.comm.wire import WireBuffer
from torch_ext.comm.worker import WorkerThread
from torch_ext.native import library


@functools.cache
def _trades() -> Callable[[int, int, int], int]:
    return library.function("tx_trades", *[ctypes.c_int64] * 3, restype=ctypes.c_int32, keep_gil=True)


class _AllGather(PendingTransfer):
    """An all-gather of weights in progress; the calling thread posts all messages at once."""

    def __init__(self, communicator: "GlooCommunicator", buffer: WireBuffer, tag: int, label: str) -> None:
        super().__init__(communicator, tag, label)
        self.shards = buffer.parts(communicator.world_size)
        self.post_recvs()
        self.post_sends()

    def result(self) -> None:
        self.wait()


class _Reduction(PendingTransfer):
    """One bucket, until its sum is complete. The base class PendingTransfer stands for the bucket's all-gather."""

    def __init__(self, communicator: "GlooCommunicator", request: ReduceRequest) -> None:
        super().__init__(communicator, request.tag + 1, request.label)
        self.communicator = communicator
        self.slots_needed = request.slots_needed
        self.request: ReduceRequest | None = request  # until it is reduced
        self.on_complete = request.on_complete
        self.parts: list[WireBuffer] = []
        self.part = Part(communicator.rank, communicator.world_size)  # the part that this rank adds up
        self.received: torch.Tensor | None = None
        self.chunks: list[WireBuffer] = []
        self.arrivals: Works = []
        self.reduced: concurrent.futures.Future[None] = concurrent.futures.Future()
        # With an on_complete the "gather" thread waits and calls it; without, the caller of `result` waits.
        self.completed: concurrent.futures.Future[None] | None = None
        if self.on_complete is not None:
            self.completed = concurrent.futures.Future()

    def post(self) -> None:
        """Posts the bucket's messages, on the "post" thread, in the order in which buckets were started."""
        try:
            assert self.request is not None
            wire, result = self.request.pack_fn()
            trades = self.communicator.count_reduction(wire, result)
            world_size = self.communicator.world_size
            self.parts = [wire] * world_size if trades else wire.parts(world_size)
            self.received, self.chunks = self.communicator.memory.take(self.parts, self.communicator.rank)
            self.arrivals = self.communicator.receive(self.chunks, self.request.tag, self.label)
            if trades:
                self.part = WHOLE
            elif result is not None:
                self.shards = self.parts if result.data is wire.data else result.parts(world_size)
                self.post_recvs()
            self.sends = self.communicator.send(self.parts, self.request.tag, self.label)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        # Kept alive: gloo may still write to this memory.
        ABANDONED.append((self.arrivals, self.chunks, self.received, self.parts, self.recvs, self.shards, self.sends))
        self.reduced.set_exception(error)

    def reduce(self) -> None:
        """Waits for the chunks, adds them up and sends the sum, on the "reduce" thread."""
        if not self.reduced.done():
            try:
                self.wait_for(self.arrivals)
                assert self.request is not None and self.received is not None
                self.request.reduce_fn(self.chunks, self.part)
                self.communicator.memory.give_back(self.received)
                self.chunks, self.arrivals, self.received, self.request = [], [], None, None
                self.post_sends()
                self.reduced.set_result(None)
            except Exception as error:
                self._fail(error)
        if self.completed is None:
            self.communicator.release_slots(self)

    def complete(self) -> None:
        """Waits for all sums and calls on_complete, on the "gather" thread. Only with an on_complete."""
        assert self.completed is not None and self.on_complete is not None
        failure: Exception | None = None
        try:
            self._wait_for_sums()
            self.on_complete()
        except Exception as error:
            failure = error
        self.on_complete = None
        self.communicator.release_slots(self)
        if failure is None:
            self.completed.set_result(None)
        else:
            self.completed.set_exception(failure)

    def _wait_for_sums(self) -> None:
        self.reduced.result()
        self.wait()
        self.parts = []

    def result(self) -> None:
        if self.completed is not None:
            self.completed.result()
        else:
            self._wait_for_sums()


class GlooCommunicator(PeerMessages):
    """A communicator that sends point-to-point messages over gloo; see Note [gloo's order and threads]."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        self.can_compress = device.type == "cpu"
        self.memory = MemoryPool()
        give_up = functools.partial(lost_ranks.leave, weakref.ref(group))  # weak: see WorkerThread
        self._posting = WorkerThread("torch_ext post", give_up)
        self._reducing = WorkerThread("torch_ext reduce", give_up)
        self._completing = WorkerThread("torch_ext gather", give_up)
        self._slots_taken = 0
        self._queue: deque[_Reduction] = deque()
        self._compressed_gathers: deque[_AllGather] = deque()

    def check_process_group(self, label: str) -> None:
        refuse_failed(self.group, label)

    def borrow(self, numel: int, dtype: torch.dtype, role: str) -> WireBuffer:
        return WireBuffer.empty(numel, dtype, self.device)

    def give_back(self, wire: WireBuffer) -> None:
        """Does nothing: the memory is freed with its last reference."""

    def _reduce(self, request: ReduceRequest) -> "concurrent.futures.Future[None] | _Reduction":
        if request.on_complete is None and self.compresses:
            request = request._replace(on_complete=_nothing)  # the "gather" thread frees the memory of its messages
        reduction = _Reduction(self, request)
        with self._lock:
            self._queue.append(reduction)
            self._start_queued()
        return reduction if reduction.completed is None else reduction.completed

    def _start_queued(self) -> None:
        """Starts queued buckets in order, as many as there are slots for. The caller holds the lock."""
        while self._queue and self._slots_taken + self._queue[0].slots_needed <= IN_FLIGHT:
            reduction = self._queue.popleft()
            self._slots_taken += reduction.slots_needed
            self._posting.submit(functools.partial(self._post_reduction, reduction))

    def _post_reduction(self, reduction: _Reduction) -> None:
        reduction.post()
        self._reducing.submit(reduction.reduce)
        if reduction.completed is not None:
            self._completing.submit(reduction.complete)

    def release_slots(self, reduction: _Reduction) -> None:
        """Frees the bucket's slots and starts the next buckets. Callable on any thread."""
        with self._lock:
            self._slots_taken -= reduction.slots_needed
            self._start_queued()

    def count_reduction(self, wire: WireBuffer, result: WireBuffer | None) -> bool:
        """Adds the bucket to `bytes_sent`. Returns whether two ranks send each other whole wires, instead of one part
        of the wire and one part of the sum."""
        trades = result is not None and bool(_trades()(self.world_size, wire.nbytes, result.nbytes))
        with self._lock:
            if trades:
                self.bytes_sent += self._message_bytes(wire)
            else:
                self._count(wire)
                self._count(result)
        return trades

    def all_gather_into_buffer(self, buffer: WireBuffer, *, tag: int, label: str) -> _AllGather:
        with self._lock:
            self._count(buffer)
        gather = _AllGather(self, buffer, tag + 1, label)
        if self._compressed(gather.shards[self.rank]):  # bounds the memory of compressed messages
            self._compressed_gathers.append(gather)
            if len(self._compressed_gathers) == IN_FLIGHT:
                self._compressed_gathers.popleft().result()
        return gather

    def all_gather_bytes(self, payload: torch.Tensor, *, tag: int, label: str) -> Callable[[], list[torch.Tensor]]:
        with self._lock:
            self.bytes_sent += payload.nbytes * (self.world_size - 1)
        gathered = [torch.empty_like(payload) for _ in range(self.world_size)]
        gathered[self.rank].copy_(payload)
        transfer = PendingTransfer(self, tag, label)
        transfer.shards = [WireBuffer.of(g) for g in gathered]
        transfer.post_recvs()
        transfer.post_sends()

        def wait() -> list[torch.Tensor]:
            transfer.wait()
            return gathered

        return wait


def _nothing() -> None: ...
