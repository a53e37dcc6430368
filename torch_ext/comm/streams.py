"""The order of work on a device: streams, events, and memory that two streams share.

Note [streams]

`Streams` is what a device can do; on a CPU all work is done when a call returns, so HostStreams does nothing.
`Ordering` and `Slots` are the rules, the same for every device:

- A bucket is sent after all work queued on the streams that produced it (`record_producer`, `send_stream`).
- It is summed on another stream, so that the next bucket is sent meanwhile (`recv_stream`). Whoever needs the sum makes
  the producing streams wait for it (`wait`), not the host.
- Memory that is sent or received is a slot's, and is used again after the event of its last reader. Memory that was
  allocated elsewhere is kept until `wait`: the allocator reuses it in the order of the stream it was allocated on.
"""

import abc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias

import torch

from torch_ext.native import cuda_library

Stream: TypeAlias = Any
Event: TypeAlias = Any


class Streams(abc.ABC):
    """The streams and events of one device."""

    blocks = False
    """Whether waiting for a collective blocks the host thread that waits."""

    @abc.abstractmethod
    def current(self) -> Stream:
        """On which this thread queues its work; hashable."""

    @abc.abstractmethod
    def new(self) -> Stream: ...

    @abc.abstractmethod
    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """Makes it the current stream inside."""

    @abc.abstractmethod
    def event(self) -> Event:
        """A new one, which may be recorded any number of times; before the first it counts as completed."""

    @abc.abstractmethod
    def record(self, event: Event, stream: Stream) -> None:
        """The event completes with everything queued on the stream so far."""

    @abc.abstractmethod
    def wait(self, stream: Stream, event: Event) -> None:
        """What is queued on the stream from here on runs after the event, as it was last recorded."""

    @abc.abstractmethod
    def query(self, event: Event) -> bool:
        """Whether it has completed, as it was last recorded. Any thread."""

    @abc.abstractmethod
    def pointer(self, stream: Stream) -> int:
        """Its handle, for C."""

    @abc.abstractmethod
    def device(self) -> AbstractContextManager[Any]:
        """Makes it the current device inside."""

    @abc.abstractmethod
    def multiprocessors(self) -> int:
        """How many the device has; 0: none to speak of."""

    @abc.abstractmethod
    def polling(self) -> AbstractContextManager[Any]:
        """Inside, the thread queries events, and nothing else: it makes no context on another device, and ends no other
        thread's capture of a graph."""


class HostStreams(Streams):
    """A CPU's: work is done when its call returns."""

    blocks = True

    def current(self) -> Stream:
        return None

    def new(self) -> Stream:
        return None

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        return nullcontext()

    def event(self) -> Event:
        return None

    def record(self, event: Event, stream: Stream) -> None:
        """It has completed."""

    def wait(self, stream: Stream, event: Event) -> None:
        """It has completed."""

    def query(self, event: Event) -> bool:
        return True

    def pointer(self, stream: Stream) -> int:
        return 0

    def device(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def multiprocessors(self) -> int:
        return 0

    def polling(self) -> AbstractContextManager[Any]:
        return nullcontext()


class CudaStreams(Streams):
    """torch's streams of one GPU. Events are made without timing, which would cost the device time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def current(self) -> Stream:
        return torch.cuda.current_stream(self._device)

    def new(self) -> Stream:
        # Above the computation: other ranks wait for what is sent.
        return torch.cuda.Stream(self._device, priority=-1)

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def event(self) -> Event:
        return torch.cuda.Event()

    def record(self, event: Event, stream: Stream) -> None:
        event.record(stream)

    def wait(self, stream: Stream, event: Event) -> None:
        stream.wait_event(event)

    def query(self, event: Event) -> bool:
        return bool(event.query())

    def pointer(self, stream: Stream) -> int:
        return int(stream.cuda_stream)

    def device(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self._device)

    def multiprocessors(self) -> int:
        return int(torch.cuda.get_device_properties(self._device).multi_processor_count)

    @contextmanager
    def polling(self) -> Iterator[None]:
        with self.device(), cuda_library.relaxed():
            yield


def streams_of(device: torch.device) -> Streams:
    return CudaStreams(device) if device.type == "cuda" else HostStreams()


class Ordering:
    """The two streams of one communicator: buckets are sent on one and summed on the other. See Note [streams]."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self._sending, self._receiving = streams.new(), streams.new()
        self._producers: dict[Stream, Event] = {}

    def record_producer(self, *streams: Stream) -> None:
        """These streams, or the current one, write something that will be sent, or allocated it: freed memory goes back
        to the stream it was allocated on."""
        for stream in streams or (self.streams.current(),):
            if stream not in self._producers:
                self._producers[stream] = self.streams.event()

    def send_stream(self) -> AbstractContextManager[Any]:
        """Inside, work follows everything queued so far on the current stream and the producers."""
        self._wait_for_producers(self._sending)
        return self.streams.on(self._sending)

    def wait_producers(self) -> None:
        """The current stream waits for everything queued on the producers so far."""
        self._wait_for_producers(self.streams.current())

    def _wait_for_producers(self, follower: Stream) -> None:
        self.record_producer()
        for stream, event in self._producers.items():
            self.streams.record(event, stream)
            self.streams.wait(follower, event)

    def recv_stream(self) -> AbstractContextManager[Any]:
        """Inside, work follows what was received before, and what it waits for itself."""
        return self.streams.on(self._receiving)

    def record_received(self, event: Event) -> None:
        """Records the event behind everything received so far."""
        self.streams.record(event, self._receiving)

    def wait(self, event: Event) -> None:
        """The current stream, the producers and the stream of slots wait for the event: what they allocated may be
        freed."""
        self.record_producer()
        for stream in (*self._producers, self._sending):
            self.streams.wait(stream, event)

    def forget_producers(self) -> None:
        """Everything produced was sent, and the sums received."""
        self._producers.clear()


class Slot:
    """Memory for one bucket that is sent or received; free again after its event."""

    def __init__(self, memory: torch.Tensor, free: Event, key: tuple[str, int]) -> None:
        self.memory, self.free, self.key = memory, free, key


class Slots:
    """Two slots for each role and size class, allocated when first asked for, and kept."""

    EACH = 2

    def __init__(self, streams: Streams, allocate: Callable[[int], torch.Tensor]) -> None:
        """allocate: so many bytes of device memory, uint8."""
        self._streams, self._allocate = streams, allocate
        self._free: dict[tuple[str, int], list[Slot]] = {}
        self._made: dict[tuple[str, int], int] = {}

    def take(self, role: str, nbytes: int) -> Slot | None:
        """A slot of nbytes or some more, for the current stream; None where both belong to buckets whose last reader is
        not queued yet (advance one, then ask again)."""
        key = (role, size_class(nbytes))
        free = self._free.setdefault(key, [])
        if not free:
            if self._made.get(key, 0) == self.EACH:
                return None
            self._made[key] = self._made.get(key, 0) + 1
            return Slot(self._allocate(key[1]), self._streams.event(), key)
        slot = free.pop(0)
        self._streams.wait(self._streams.current(), slot.free)
        return slot

    def give_back(self, slot: Slot) -> None:
        """Free again after what is queued on the current stream so far."""
        self._streams.record(slot.free, self._streams.current())
        self._free[slot.key].append(slot)


def size_class(nbytes: int) -> int:
    """The least of 512, 640, 768, 896, 1024, 1280, ... (four in each doubling) that is not less."""
    if nbytes <= 512:
        return 512
    step = 1 << (nbytes - 1).bit_length() - 3
    return -(-nbytes // step) * step
