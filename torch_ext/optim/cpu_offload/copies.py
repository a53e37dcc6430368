"""Copies between the device and the host, which run beside both: the one place that knows the device.

`lanes_of` gives a lane for each direction. On a machine whose parameters lie in host memory the same copies are made at
once, between ordinary memories.
"""

import abc
import atexit
import contextlib
import ctypes
import functools
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_ext.native import cuda_library
from torch_ext.optim.cpu_offload import staged_args


class CopyStream(abc.ABC):
    """Copies one after the other, in the order in which they were asked for, by any thread."""

    @abc.abstractmethod
    def begin(self) -> None:
        """Copies from here on see what the device was told to do so far."""

    @abc.abstractmethod
    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Pairs of equal shapes. Neither is touched by anybody until `wait` of a later mark, or `end`, came back."""

    @abc.abstractmethod
    def mark(self) -> Any:
        """Stands for everything that was asked for so far."""

    @abc.abstractmethod
    def wait(self, mark: Any) -> None:
        """The host waits until it is done."""

    @abc.abstractmethod
    def end(self) -> None:
        """The device goes on when everything is done."""

    def waiting(self) -> contextlib.AbstractContextManager[Any]:
        """Inside, waits end no other thread's capture of a graph."""
        return contextlib.nullcontext()


class HostCopyStream(CopyStream):
    """Host memory in the place of a device's: a copy is done when `copy` comes back."""

    def begin(self) -> None: ...

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)

    def mark(self) -> Any:
        return None

    def wait(self, mark: Any) -> None: ...

    def end(self) -> None: ...


class CudaCopyStream(CopyStream):
    """A stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def begin(self) -> None:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        with torch.cuda.stream(self.stream):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)

    def mark(self) -> Any:
        return self.stream.record_event()

    def wait(self, mark: Any) -> None:
        mark.synchronize()

    def end(self) -> None:
        torch.cuda.current_stream(self.device).wait_stream(self.stream)

    def waiting(self) -> contextlib.AbstractContextManager[Any]:
        return cuda_library.relaxed()


class CopyStreams(NamedTuple):
    down: CopyStream
    up: CopyStream
    slots: int
    """How many batches each thread has under way."""
    numel: int
    """Elements of a batch; a multiple of SAMPLED."""
    shared: bool
    """Whether the device's memory is the host's: what is only looked at need not be copied then."""
    native: Callable[[int], int | None]
    """For tx_adamw_offloaded with so many slots in all: the address of lanes beside these, which lives as long as they
    do; None: host memory is copied by who steps it."""

    def buffer(self, numel: int) -> Tensor:
        """Host memory for copies: bytes."""
        return torch.empty(numel, dtype=torch.uint8, pin_memory=not self.shared)


# What was copied shall be in the second-level cache when it is stepped, and go back from there; what the step itself
# reads and writes passes through it, too. Measured: 16 Ki to 64 Ki elements do equally well, fewer or more are slower.
_NUMEL = 1 << 15
# A copy from or to a device takes ten microseconds at least: those of a batch shall take several times as long.
_NUMEL_OF_DEVICE = 1 << 19


def lanes_of(device: torch.device) -> CopyStreams:
    """The lanes to and from a device, and what they are best used with. ValueError where there are none."""
    if device.type == "cpu":
        # Copies are done when they are asked for: another batch in advance would only take room in the cache.
        return CopyStreams(
            HostCopyStream(), HostCopyStream(), slots=1, numel=_NUMEL, shared=True, native=lambda slots: None
        )
    if device.type == "cuda":
        down, up = CudaCopyStream(device), CudaCopyStream(device)
        return CopyStreams(down, up, slots=3, numel=_NUMEL_OF_DEVICE, shared=False, native=NativeCopyOps(down, up))
    raise ValueError(f"offload_fraction: parameters are on {device}; cpu and cuda are legal")


class NativeCopyOps:
    """`CopyStreams.native` over the streams of two lanes: made for as many slots as were asked for so far."""

    def __init__(self, down: CudaCopyStream, up: CudaCopyStream) -> None:
        self._down, self._up, self._slots = down, up, 0
        self._made: list[staged_args.CudaCopyOps] = []  # earlier ones may have copies under way

    def __call__(self, slots: int) -> int:
        if slots > self._slots:
            index = self._down.stream.device_index
            streams = self._down.stream.cuda_stream, self._up.stream.cuda_stream
            self._made.append(staged_args.CudaCopyOps(index, *streams, slots))
            self._slots = slots
        return ctypes.addressof(self._made[-1].native)


_ALIGNMENT = 64  # bytes, of everything in a buffer: a cache line


class Layout:
    """Where in a buffer tensors lie, one after the other."""

    def __init__(self) -> None:
        self.nbytes = 0

    def place(self, numel: int, dtype: torch.dtype) -> slice:
        """The bytes of a tensor."""
        begin = self.nbytes
        end = begin + numel * dtype.itemsize
        self.nbytes = -(-end // _ALIGNMENT) * _ALIGNMENT
        return slice(begin, end)


class Buffers:
    """Host memory for copies, made once: of the largest size that was asked for so far.

    The library's copies are not known to torch, which would give pinned memory to somebody else as soon as nobody has
    it: it is let go of when they are done, and so is the process.
    """

    def __init__(self, lanes: CopyStreams, device: torch.device) -> None:
        self.lanes, self.device = lanes, device
        self._made: dict[Hashable, Tensor] = {}
        weakref.finalize(self, _finish, lanes).atexit = False
        _finish_before_exit()
        _alive.add(self)

    def take(self, what: Hashable, nbytes: int) -> Tensor:
        """At least so many bytes; the same ones whenever the same is asked for."""
        made = self._made.get(what)
        if made is None or made.numel() < nbytes:
            self.lanes.up.wait(self.lanes.up.mark())  # what there is may be on its way still
            made = self._made[what] = self.lanes.buffer(nbytes)
        return made


_alive: "weakref.WeakSet[Buffers]" = weakref.WeakSet()


def _finish(lanes: CopyStreams) -> None:
    """Any thread, also while another one captures a graph."""
    with contextlib.suppress(RuntimeError), lanes.up.waiting():  # a device that failed has nothing on its way any more
        for lane in (lanes.down, lanes.up):
            lane.wait(lane.mark())


@functools.cache
def _finish_before_exit() -> None:
    """At exit, handlers run in the reverse order of their registration: ours ahead of those of torch, which is loaded
    and has a device by now."""

    def finish_all() -> None:
        for buffers in list(_alive):
            _finish(buffers.lanes)

    atexit.register(finish_all)
