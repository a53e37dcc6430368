"""The communicator over any back end that has all-to-all and all-gather, mainly NCCL.

Collectives have no tags: ranks match them by the order of calls. So all of them are issued by the thread that runs
backward, in the same order on all ranks. A bucket's all-to-all is issued when the bucket is started. Its sum and
all-gather follow, on a device, when the next bucket was sent: there they are only queued on a stream. On a CPU they
would make the thread wait, so they follow when the result is asked for.

On a device, the host waits for nothing here: see Note [streams] in `comm/streams.py`. The ranks' reports between
buckets and cycles go from host to host, over gloo: reading data that a device received would wait for the device.
"""

import datetime
import weakref
from collections import deque
from collections.abc import Callable

import torch
import torch.distributed as dist

from torch_ext.comm import group_calls
from torch_ext.comm.communicator import Communicator, Part, ReduceRequest, Work
from torch_ext.comm.gloo import GlooCommunicator
from torch_ext.comm.process_group import backend, timeout_of
from torch_ext.comm.streams import Event, Slot, Slots
from torch_ext.comm.transport import Transport, TransportWork
from torch_ext.comm.wire import WireBuffer


class _Reduction:
    """A bucket whose all-to-all was issued. `advance` issues the sum and the all-gather, `result` waits for them."""

    def __init__(self, communicator: "CollectiveCommunicator", request: ReduceRequest) -> None:
        self.communicator = communicator
        # Kept until `result`: queued work reads memory that the request's functions reference.
        self.request: ReduceRequest | None = request
        self.event = communicator.take_event()
        self.failure: Exception | None = None
        with communicator.ordering.send_stream():
            self.wire, self.gathered = request.pack_fn()
            self.received, self.slot = communicator.lend(self.wire.data.numel(), self.wire.data.dtype, "received")
            sent = self.wire.messages()
            self.works = communicator.transport.all_to_all(self.received.messages(), sent, request.label)

    def advance(self) -> None:
        """Issues sum and all-gather: only queued on a device; on a CPU this waits for them."""
        try:
            self._advance()
        except Exception as error:
            self.failure = error  # also for `result`: another bucket's call may have advanced this one
            raise

    def _advance(self) -> None:
        assert self.request is not None
        communicator, request = self.communicator, self.request
        part = Part(communicator.rank, communicator.world_size)
        with communicator.ordering.recv_stream():
            _wait(self.works)
            request.reduce_fn(self.received.parts(part.of), part)
            communicator.slots.give_back(self.slot)
            if self.gathered is not None:
                _wait(communicator.transport.all_gather(self.gathered.messages(), part.number, request.label))
            if request.on_complete is not None:
                request.on_complete()
            communicator.ordering.record_received(self.event)

    def result(self) -> None:
        if self.request is None:
            return
        self.communicator.advance_to(self)
        if self.failure is not None:
            raise self.failure
        self.communicator.ordering.wait(self.event)
        self.communicator.events.append(self.event)
        del self.wire, self.gathered, self.received, self.slot, self.works
        self.request = None


class _AllGather:
    """An all-gather of weights in progress."""

    def __init__(self, buffer: WireBuffer, works: list[TransportWork]) -> None:
        self._buffer: WireBuffer | None = buffer  # kept alive while the back end writes to it
        self._works = works

    def result(self) -> None:
        works, self._works = self._works, []
        _wait(works)
        self._buffer = None


def _wait(works: list[TransportWork]) -> None:
    for work in works:
        work.wait()


class CollectiveCommunicator(Communicator):
    """A communicator that uses a process group's collectives; see the module's docstring."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, transport: Transport) -> None:
        super().__init__(group, device)
        self.transport = transport
        self.slots = Slots(self.ordering.streams, self.transport.allocate)
        self.events: list[Event] = []  # events that can be reused
        self._borrowed: dict[int, Slot] = {}  # address -> the slot of memory that `borrow` returned
        self._control: Communicator | None = None  # for reports between hosts
        self._under_way: deque[_Reduction] = deque()  # buckets that have not advanced, oldest first

    def take_event(self) -> Event:
        return self.events.pop() if self.events else self.ordering.streams.event()

    def lend(self, numel: int, dtype: torch.dtype, role: str) -> tuple[WireBuffer, Slot]:
        """Returns memory in a slot. If both slots of this size class are in use, advances the oldest buckets until one
        is free, which all ranks do alike."""
        nbytes = WireBuffer.size_of(numel, dtype)
        while (slot := self.slots.take(role, nbytes)) is None:
            self._under_way.popleft().advance()
        codes = slot.memory[: numel * dtype.itemsize].view(dtype)
        return WireBuffer(codes, slot.memory[codes.nbytes : nbytes]), slot

    def borrow(self, numel: int, dtype: torch.dtype, role: str) -> WireBuffer:
        wire, slot = self.lend(numel, dtype, role)
        self._borrowed[wire.data.data_ptr()] = slot
        return wire

    def give_back(self, wire: WireBuffer) -> None:
        self.slots.give_back(self._borrowed.pop(wire.data.data_ptr()))

    def _reduce(self, request: ReduceRequest) -> Work:
        reduction = _Reduction(self, request)
        self._count(reduction.wire)
        self._count(reduction.gathered)
        if self.deferring and self._under_way:
            self.advance_to(self._under_way[-1])
        self._under_way.append(reduction)
        return reduction

    def advance_to(self, reduction: _Reduction) -> None:
        """Advances every bucket up to this one, in the order in which they were sent."""
        while reduction in self._under_way:
            self._under_way.popleft().advance()

    def all_gather_into_buffer(self, buffer: WireBuffer, *, tag: int, label: str) -> Work:
        self._count(buffer)
        return _AllGather(buffer, self.transport.all_gather(buffer.messages(), self.rank, label))

    def all_gather_bytes(self, payload: torch.Tensor, *, tag: int, label: str) -> Callable[[], list[torch.Tensor]]:
        """Implements `Communicator.all_gather_bytes`; over gloo if work is deferred, so that no host waits for the
        device."""
        if self.deferring:
            if self._control is None:
                self._control = control_communicator(self.group, self.device)
            return self._reports(self._control, payload, tag, label)
        self.bytes_sent += payload.nbytes * (self.world_size - 1)
        gathered = [torch.empty_like(payload) for _ in range(self.world_size)]
        work = group_calls.all_gather(gathered, payload, self.group, label)

        def wait() -> list[torch.Tensor]:
            work.wait()
            return gathered

        return wait

    def _reports(
        self, control: Communicator, payload: torch.Tensor, tag: int, label: str
    ) -> Callable[[], list[torch.Tensor]]:
        """All-gathers a report together with the transport's digest of issued collectives. If digests differ, the ranks
        issued different collectives, and the transport raises."""
        digest = self.transport.digest()
        numel = payload.numel()
        gather = control.all_gather_bytes(torch.cat([payload.view(-1), digest]), tag=tag, label=label)

        def wait() -> list[torch.Tensor]:
            rows = gather()
            if any(not torch.equal(row[numel:], digest) for row in rows):
                self.transport.explain(tag)
            return [row[:numel] for row in rows]

        return wait


# Process group -> its gloo group. Cached, because gloo starts threads for each group.
_groups: "weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup]" = weakref.WeakKeyDictionary()

_HOST = torch.device("cpu")


def control_communicator(group: dist.ProcessGroup, device: torch.device) -> Communicator:
    """Returns a gloo communicator for host memory between the group's ranks, with the group's timeout for the device.

    The first call for a group is collective. Raises RuntimeError if this torch has no gloo.
    """
    if backend(group, _HOST) == "gloo":
        return GlooCommunicator(group, _HOST)
    if group not in _groups:
        if not dist.is_gloo_available():
            raise RuntimeError(
                "the process group moves device memory only, and torch_ext also exchanges metadata between hosts "
                "over gloo, which this torch is built without: use a torch with gloo"
            )
        ranks = dist.get_process_group_ranks(group)
        timeout = datetime.timedelta(seconds=timeout_of(group, device))
        _groups[group] = group_calls.new_group(ranks, timeout, group, "a gloo group for the process group's hosts")
    return GlooCommunicator(_groups[group], _HOST)
