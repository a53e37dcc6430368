"""What work that a device does later must wait for: streams, events, and memory that two streams share.

Everything about streams is here. `Streams` is what a device can do; a CPU has done everything when a call returns, so
its own is trivial. `Ordering` and `Slots` are the rules, which are the same for every device:

- A bucket leaves behind everything that was given to a stream that wrote into it (`wrote`, `leave`).
- Its sum is taken on another stream, so that the next bucket leaves meanwhile; whoever wants it makes the streams that
  wrote wait for it (`join`), not the host.
- Memory that travels is borrowed from a slot and belongs to nobody else until the event of its last reader. Memory that
  was allocated elsewhere is kept until `join`: the allocator hands it out again in the order of the stream it came
  from.
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
    """One device's."""

    blocks = False
    """Whether waiting for a collective holds up the thread that waits."""

    @abc.abstractmethod
    def current(self) -> Stream:
        """To which this thread gives its work; hashable."""

    @abc.abstractmethod
    def new(self) -> Stream: ...

    @abc.abstractmethod
    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """Makes it current inside."""

    @abc.abstractmethod
    def event(self) -> Event:
        """Which may be recorded any number of times, and counts as passed before the first."""

    @abc.abstractmethod
    def record(self, event: Event, stream: Stream) -> None:
        """The event passes when everything given to the stream so far is done."""

    @abc.abstractmethod
    def wait(self, stream: Stream, event: Event) -> None:
        """What is given to the stream from here on runs after the event, as it was last recorded."""

    @abc.abstractmethod
    def query(self, event: Event) -> bool:
        """Whether it has, as it was last recorded. Any thread."""

    @abc.abstractmethod
    def pointer(self, stream: Stream) -> int:
        """For C."""

    @abc.abstractmethod
    def device(self) -> AbstractContextManager[Any]:
        """Makes it the current device inside."""

    @abc.abstractmethod
    def polling(self) -> AbstractContextManager[Any]:
        """Inside, the thread asks what has passed, and nothing else: it makes no context on another device, and ends no
        other thread's capture of a graph."""


class HostStreams(Streams):
    """A CPU's: when a call returns, it has happened."""

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
        """It has passed."""

    def wait(self, stream: Stream, event: Event) -> None:
        """It has passed."""

    def query(self, event: Event) -> bool:
        return True

    def pointer(self, stream: Stream) -> int:
        return 0

    def device(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def polling(self) -> AbstractContextManager[Any]:
        return nullcontext()


class CudaStreams(Streams):
    """torch's streams of one GPU. Events are made without timing, which would cost the device time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def current(self) -> Stream:
        return torch.cuda.current_stream(self._device)

    def new(self) -> Stream:
        # Above the computation: what travels is what the others wait for.
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

    @contextmanager
    def polling(self) -> Iterator[None]:
        with self.device(), cuda_library.relaxed():
            yield


def streams_of(device: torch.device) -> Streams:
    return CudaStreams(device) if device.type == "cuda" else HostStreams()


class Ordering:
    """The two streams of one exchange: buckets leave on one and are added up on the other."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self._sending, self._receiving = streams.new(), streams.new()
        self._producers: dict[Stream, Event] = {}

    def record_producer(self, *streams: Stream) -> None:
        """These streams, or the current one, were given something to write that will leave, or allocated it: memory is
        its stream's again as soon as nobody has it any more."""
        for stream in streams or (self.streams.current(),):
            if stream not in self._producers:
                self._producers[stream] = self.streams.event()

    def send_stream(self) -> AbstractContextManager[Any]:
        """Inside, work follows everything that the current stream and those that wrote were given so far."""
        self._wait_for_producers(self._sending)
        return self.streams.on(self._sending)

    def wait_producers(self) -> None:
        """The current stream goes on after everything that those that wrote were given so far."""
        self._wait_for_producers(self.streams.current())

    def _wait_for_producers(self, follower: Stream) -> None:
        self.record_producer()
        for stream, event in self._producers.items():
            self.streams.record(event, stream)
            self.streams.wait(follower, event)

    def recv_stream(self) -> AbstractContextManager[Any]:
        """Inside, work follows what arrived before, and what it waits for itself."""
        return self.streams.on(self._receiving)

    def record_received(self, event: Event) -> None:
        """The event of everything that arrived so far."""
        self.streams.record(event, self._receiving)

    def wait(self, event: Event) -> None:
        """The current stream goes on after the event, and so do those that wrote and the one that slots came from: what
        they allocated may be freed."""
        self.record_producer()
        for stream in (*self._producers, self._sending):
            self.streams.wait(stream, event)

    def forget_producers(self) -> None:
        """What was written has left and arrived."""
        self._producers.clear()


class Slot:
    """Memory for one bucket on its way."""

    def __init__(self, memory: torch.Tensor, free: Event, key: tuple[str, int]) -> None:
        self.memory, self.free, self.key = memory, free, key


class Slots:
    """Two slots for each role and size class, made when they are first wanted and kept."""

    EACH = 2

    def __init__(self, streams: Streams, allocate: Callable[[int], torch.Tensor]) -> None:
        """allocate: so many bytes of device memory, uint8."""
        self._streams, self._allocate = streams, allocate
        self._free: dict[tuple[str, int], list[Slot]] = {}
        self._made: dict[tuple[str, int], int] = {}

    def take(self, role: str, nbytes: int) -> Slot | None:
        """A slot of nbytes or some more, for the current stream; None where both are given to buckets whose last
        reader has not been told yet (finish one, then ask again)."""
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
        """Free again after what the current stream was given so far."""
        self._streams.record(slot.free, self._streams.current())
        self._free[slot.key].append(slot)


def size_class(nbytes: int) -> int:
    """The least of 512, 640, 768, 896, 1024, 1280, ... (four in each doubling) that is not less."""
    if nbytes <= 512:
        return 512
    step = 1 << (nbytes - 1).bit_length() - 3
    return -(-nbytes // step) * step
