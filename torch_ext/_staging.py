"""Copies between the device and the host, which run beside both: the one place that knows the device.

`lanes_of` gives a lane for each direction. On a machine whose parameters lie in host memory the same copies are made at
once, between ordinary memories.
"""

import abc
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_ext import _copies


class Lane(abc.ABC):
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
    def follow(self, mark: Any) -> None:
        """Copies from here on come after what the mark, maybe of another lane, stands for."""

    @abc.abstractmethod
    def wait(self, mark: Any) -> None:
        """The host waits until it is done."""

    @abc.abstractmethod
    def end(self) -> None:
        """The device goes on when everything is done."""


class HostLane(Lane):
    """Host memory in the place of a device's: a copy is done when `copy` comes back."""

    def __init__(self) -> None:
        self._copy = _copies.on_this_thread()

    def begin(self) -> None: ...

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        for target, source in zip(targets, sources, strict=True):
            if target.dtype == source.dtype and target.is_contiguous() and source.is_contiguous():
                # copy_ would wait for torch's pool.
                self._copy(target.data_ptr(), source.data_ptr(), target.nbytes)
            else:
                target.copy_(source)

    def mark(self) -> Any:
        return None

    def follow(self, mark: Any) -> None: ...

    def wait(self, mark: Any) -> None: ...

    def end(self) -> None: ...


class CudaLane(Lane):
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

    def follow(self, mark: Any) -> None:
        self.stream.wait_event(mark)

    def wait(self, mark: Any) -> None:
        mark.synchronize()

    def end(self) -> None:
        torch.cuda.current_stream(self.device).wait_stream(self.stream)


_LEAST = 1 << 16
"""Elements of a batch below which another thread is not worth being started for it."""


class Lanes(NamedTuple):
    down: Lane
    up: Lane
    workers: int
    """How many threads step batches beside each other."""
    slots: int
    """How many batches each of them has under way."""
    numel: int
    """Elements of a batch at most: few, so that what was copied is still in the cache when it is stepped, and enough for
    the interpreter's thirty microseconds beside it."""
    shared: bool
    """Whether the device's memory is the host's: what is only looked at need not be copied then."""

    def batch_of(self, total: int) -> int:
        """Elements of a batch where `total` of them are stepped: equal parts, and as many for each thread, unless they
        would be too small to be worth a thread."""
        rounds = -(-total // (self.workers * self.numel))
        return max(min(self.numel, _LEAST), -(-total // max(rounds * self.workers, 1)))

    def buffer(self, numel: int) -> Tensor:
        """Host memory for copies: bytes."""
        return torch.empty(numel, dtype=torch.uint8, pin_memory=not self.shared)


# Threads get their batches one after the other, for which the interpreter has a lock: many threads need larger ones.
_NUMEL, _NUMEL_OF_THREAD = 1 << 19, 1 << 16


def lanes_of(device: torch.device) -> Lanes:
    """The lanes to and from a device, and what they are best used with. ValueError where there are none."""
    workers = torch.get_num_threads()
    numel = max(_NUMEL, workers * _NUMEL_OF_THREAD)
    if device.type == "cpu":
        # Copies are done when they are asked for: another batch in advance would only take room in the cache.
        return Lanes(HostLane(), HostLane(), workers, slots=1, numel=numel, shared=True)
    if device.type == "cuda":
        return Lanes(CudaLane(device), CudaLane(device), workers, slots=3, numel=numel, shared=False)
    raise ValueError(f"offload_fraction: parameters are on {device}; cpu and cuda are legal")


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
    """Host memory for copies, made once: of the largest size that was asked for so far."""

    def __init__(self, lanes: Lanes, device: torch.device) -> None:
        self.lanes, self.device = lanes, device
        self._made: dict[tuple[str, int], Tensor] = {}

    def take(self, what: str, slot: int, nbytes: int) -> Tensor:
        """At least so many bytes; the same ones whenever the same is asked for."""
        made = self._made.get((what, slot))
        if made is None or made.numel() < nbytes:
            made = self._made[what, slot] = self.lanes.buffer(nbytes)
        return made
