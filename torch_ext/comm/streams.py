"""Orders work on a device: streams, events, and memory that two streams share.

Note [streams]

The host must not wait for the device, so the order of sends, sums and memory reuse is kept by streams and events.
`Streams` are the operations that a device offers. On a CPU all work is done when a call returns, so HostStreams does
nothing. `Ordering` and `Slots` are the rules, the same for every device:

- A bucket is sent after all work queued on the streams that produced it (`record_producer`, `send_stream`).
- A bucket is summed on another stream (`recv_stream`), so that the next bucket is sent meanwhile. To use the sum, the
  producing streams are made to wait for it (`wait`); the host does not wait.
- Memory that is sent or received belongs to a slot, and is reused after the event of its last reader. Memory that was
  allocated otherwise is kept alive until `wait`, because the allocator would reuse it in the order of the stream on
  which it was allocated.
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
        """Returns the stream on which this thread queues its work; hashable."""

    @abc.abstractmethod
    def new(self) -> Stream: ...

    @abc.abstractmethod
    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """Context in which this stream is the current one."""

    @abc.abstractmethod
    def event(self) -> Event:
        """Returns a new event. It can be recorded any number of times, and counts as completed before the first."""

    @abc.abstractmethod
    def record(self, event: Event, stream: Stream) -> None:
        """Records the event: it completes with everything queued on the stream so far."""

    @abc.abstractmethod
    def wait(self, stream: Stream, event: Event) -> None:
        """Makes all work that is queued on the stream from now on wait for the event's last recording."""

    @abc.abstractmethod
    def query(self, event: Event) -> bool:
        """Whether the event's last recording has completed. Callable on any thread."""

    @abc.abstractmethod
    def pointer(self, stream: Stream) -> int:
        """Returns the stream's handle, for C."""

    @abc.abstractmethod
    def device(self) -> AbstractContextManager[Any]:
        """Context in which this device is the current one."""

    @abc.abstractmethod
    def multiprocessors(self) -> int:
        """Returns the number of the device's multiprocessors; 0 for a CPU."""

    @abc.abstractmethod
    def polling(self) -> AbstractContextManager[Any]:
        """Context for a thread that only queries events. It creates no CUDA context on another device, and does not
        invalidate another thread's graph capture."""


class HostStreams(Streams):
    """The streams of a CPU: work is done when its call returns."""

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
        """Does nothing: all work has completed."""

    def wait(self, stream: Stream, event: Event) -> None:
        """Does nothing: all work has completed."""

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
    """torch's streams of one GPU. Events are created without timing, which would cost time on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def current(self) -> Stream:
        return torch.cuda.current_stream(self._device)

    def new(self) -> Stream:
        # A higher priority than the computation's, because other ranks wait for the messages.
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
    """The two streams of a communicator: buckets are sent on one and summed on the other. See Note [streams]."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self._sending, self._receiving = streams.new(), streams.new()
        self._producers: dict[Stream, Event] = {}

    def record_producer(self, *streams: Stream) -> None:
        """Registers streams, by default the current one, that write data to be sent, or on which its memory was
        allocated (freed memory returns to the stream on which it was allocated)."""
        for stream in streams or (self.streams.current(),):
            if stream not in self._producers:
                self._producers[stream] = self.streams.event()

    def send_stream(self) -> AbstractContextManager[Any]:
        """Context in which work is queued on the sending stream, after everything queued so far on the current stream
        and the producers."""
        self._wait_for_producers(self._sending)
        return self.streams.on(self._sending)

    def wait_producers(self) -> None:
        """Makes the current stream wait for everything queued on the producers so far."""
        self._wait_for_producers(self.streams.current())

    def _wait_for_producers(self, follower: Stream) -> None:
        self.record_producer()
        for stream, event in self._producers.items():
            self.streams.record(event, stream)
            self.streams.wait(follower, event)

    def recv_stream(self) -> AbstractContextManager[Any]:
        """Context in which work is queued on the receiving stream, after everything queued there before."""
        return self.streams.on(self._receiving)

    def record_received(self, event: Event) -> None:
        """Records the event after everything received so far."""
        self.streams.record(event, self._receiving)

    def wait(self, event: Event) -> None:
        """Makes the current stream, the producers and the sending stream (which uses slots) wait for the event. Memory
        that was allocated on these may be freed then."""
        self.record_producer()
        for stream in (*self._producers, self._sending):
            self.streams.wait(stream, event)

    def forget_producers(self) -> None:
        """Called when everything that producers wrote was sent, and all sums were received."""
        self._producers.clear()


class Slot:
    """Memory for one bucket that is sent or received; can be reused after its event `free`."""

    def __init__(self, memory: torch.Tensor, free: Event, key: tuple[str, int]) -> None:
        self.memory, self.free, self.key = memory, free, key


class Slots:
    """Two slots for each role and size class. They are allocated when they are first needed, and kept."""

    EACH = 2

    def __init__(self, streams: Streams, allocate: Callable[[int], torch.Tensor]) -> None:
        """allocate: returns so many bytes of device memory, uint8."""
        self._streams, self._allocate = streams, allocate
        self._free: dict[tuple[str, int], list[Slot]] = {}
        self._made: dict[tuple[str, int], int] = {}

    def take(self, role: str, nbytes: int) -> Slot | None:
        """Returns a slot of at least nbytes, for use on the current stream. None if both slots belong to buckets whose
        last reader is not queued yet: the caller advances a bucket and calls again."""
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
        """Returns the slot; it can be reused after everything queued on the current stream so far."""
        self._streams.record(slot.free, self._streams.current())
        self._free[slot.key].append(slot)


def size_class(nbytes: int) -> int:
    """Rounds up to the next of 512, 640, 768, 896, 1024, 1280, ... (four sizes in each doubling)."""
    if nbytes <= 512:
        return 512
    step = 1 << (nbytes - 1).bit_length() - 3
    return -(-nbytes // step) * step
