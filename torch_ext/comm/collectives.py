"""The communicator over any back end that has all-to-all and all-gather, NCCL above all.

Collectives have no tags: the order of calls is their name. So each is issued by the thread that runs backward, in one
order on all ranks: a bucket's all-to-all when it is started; its sum and all-gather when the next bucket was sent (on a
device, where that only queues work on a stream) or when its result is asked for (on a CPU, where it would wait).

On a device nothing here waits on the host: see Note [streams] in `comm/streams.py`. The ranks' reports between buckets
and cycles go from host to host, over gloo, since reading what a device received would wait for the device.
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
    """A bucket between its all-to-all and its sum."""

    def __init__(self, communicator: "CollectiveCommunicator", request: ReduceRequest) -> None:
        self.communicator = communicator
        # The PackFn reads memory that others allocated, which has to live until `result`.
        self.request: ReduceRequest | None = request
        self.event = communicator.take_event()
        self.failure: Exception | None = None
        with communicator.ordering.send_stream():
            self.wire, self.gathered = request.pack_fn()
            self.received, self.slot = communicator.lend(self.wire.data.numel(), self.wire.data.dtype, "received")
            sent = self.wire.messages()
            self.works = communicator.transport.all_to_all(self.received.messages(), sent, request.label)

    def advance(self) -> None:
        """Queues the rest on the device; on a CPU, does it."""
        try:
            self._advance()
        except Exception as error:
            self.failure = error  # whoever advances need not be who asks for the result
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
    """Weights that are being gathered."""

    def __init__(self, buffer: WireBuffer, works: list[TransportWork]) -> None:
        self._buffer: WireBuffer | None = buffer  # kept while it is written
        self._works = works

    def result(self) -> None:
        works, self._works = self._works, []
        _wait(works)
        self._buffer = None


def _wait(works: list[TransportWork]) -> None:
    for work in works:
        work.wait()


class CollectiveCommunicator(Communicator):
    """See the module's docstring."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, transport: Transport) -> None:
        super().__init__(group, device)
        self.transport = transport
        self.slots = Slots(self.ordering.streams, self.transport.allocate)
        self.events: list[Event] = []  # free ones
        self._borrowed: dict[int, Slot] = {}  # by address
        self._control: Communicator | None = None
        self._under_way: deque[_Reduction] = deque()  # which have not advanced

    def take_event(self) -> Event:
        return self.events.pop() if self.events else self.ordering.streams.event()

    def lend(self, numel: int, dtype: torch.dtype, role: str) -> tuple[WireBuffer, Slot]:
        """Memory of a slot. Where both of its class are in use, the oldest bucket is advanced first, on every rank."""
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
        """Every bucket up to this one, in the order in which they were sent."""
        while reduction in self._under_way:
            self._under_way.popleft().advance()

    def all_gather_into_buffer(self, buffer: WireBuffer, *, tag: int, label: str) -> Work:
        self._count(buffer)
        return _AllGather(buffer, self.transport.all_gather(buffer.messages(), self.rank, label))

    def all_gather_bytes(self, payload: torch.Tensor, *, tag: int, label: str) -> Callable[[], list[torch.Tensor]]:
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
        """With the transport's digest, by which ranks notice that they issued different collectives."""
        digest = self.transport.digest()
        numel = payload.numel()
        gather = control.all_gather_bytes(torch.cat([payload.view(-1), digest]), tag=tag, label=label)

        def wait() -> list[torch.Tensor]:
            rows = gather()
            if any(not torch.equal(row[numel:], digest) for row in rows):
                self.transport.explain(tag)
            return [row[:numel] for row in rows]

        return wait


# One for each group that exists: gloo has threads for each of its own.
_groups: "weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup]" = weakref.WeakKeyDictionary()

_HOST = torch.device("cpu")


def control_communicator(group: dist.ProcessGroup, device: torch.device) -> Communicator:
    """A gloo communicator between the group's ranks for host memory, with the group's timeout for the device.

    Every rank of the group asks for the first time at the same place. Raises RuntimeError where this torch has no gloo.
    """
    if backend(group, _HOST) == "gloo":
        return GlooCommunicator(group, _HOST)
    if group not in _groups:
        if not dist.is_gloo_available():
            raise RuntimeError(
                "the process group moves device memory only, and this torch has no gloo for what ranks tell each "
                "other: use a torch that has it"
            )
        ranks = dist.get_process_group_ranks(group)
        timeout = datetime.timedelta(seconds=timeout_of(group, device))
        _groups[group] = group_calls.new_group(ranks, timeout, group, "a gloo group beside the process group")
    return GlooCommunicator(_groups[group], _HOST)
