"""Copies between a device and the host, which run beside what both compute: the one place of the step on the host that
knows the device. `copies_of` makes them.
"""

import atexit
import contextlib
import ctypes
import functools
import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_ext.native import cuda_library, library
from torch_ext.optim.cpu_offload.staged_args import CopyOps
from torch_ext.tensors import host_copies


class HostCopies:
    """Parameters and gradients lie in host memory, too: a copy is done when it is asked for, and another batch in
    advance would only take room in the cache. Also what the copies of a device are asked for."""

    shared = True
    """Whether the device's memory is the host's: what is only read need not be copied then."""
    slots = 1
    """How many batches each thread has under way."""
    numel = 1 << 15
    """Elements of a batch; a multiple of SAMPLED. What was copied shall be in the second-level cache when it is
    stepped, and be copied back from there; what the step itself reads and writes passes through it, too. Measured:
    16 Ki to 64 Ki elements do equally well, fewer or more are slower."""

    def buffer(self, nbytes: int) -> Tensor:
        """Host memory for copies: uint8 [nbytes], uninitialised."""
        return host_copies.allocate(nbytes, pinned=not self.shared)

    def begin(self) -> None:
        """Copies from here on wait for what the device was told to do so far."""

    def to_host(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Copies one after the other, pairs of equal shapes, asked for by any thread. Both stay as they are until
        `wait` for a later mark has returned."""
        host_copies.copy(zip(targets, sources, strict=True))

    def mark(self) -> Any:
        """Stands for every copy to the host that was asked for so far."""

    def wait(self, mark: Any) -> None:
        """The host waits until what the mark stands for is done."""

    def end(self) -> None:
        """What the device is told to do from here on waits for every copy to it."""

    def finish(self) -> None:
        """The host waits until every copy is done. Ends no other thread's capture of a graph."""

    def native(self, slots: int) -> int | None:
        """For tx_adamw_offloaded with so many slots in all: the address of a tx_copy_ops, which lives as long as this.
        None: host memory is copied by the thread that steps it."""
        return None


class CudaCopies(HostCopies):
    """A stream for each direction."""

    shared = False
    slots = 3
    numel = 1 << 19  # a copy takes ten microseconds at least: those of a batch shall take several times as long

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._down, self._up = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._ops: list[_CudaCopyOps] = []  # earlier ones, of fewer slots, may have copies under way

    def begin(self) -> None:
        for stream in (self._down, self._up):
            stream.wait_stream(torch.cuda.current_stream(self._device))

    def to_host(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        with torch.cuda.stream(self._down):
            super().to_host(targets, sources)

    def mark(self) -> Any:
        return self._down.record_event()

    def wait(self, mark: Any) -> None:
        mark.synchronize()

    def end(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._up)

    def finish(self) -> None:
        with cuda_library.relaxed():
            for stream in (self._down, self._up):
                stream.record_event().synchronize()

    def native(self, slots: int) -> int:
        if not self._ops or self._ops[-1].slots < slots:
            self._ops.append(_CudaCopyOps(self._down, self._up, slots))
        return ctypes.addressof(self._ops[-1])


class _CudaCopyOps(CopyOps):
    """Copies by the library for GPUs, over two streams, which must stay. Raises RuntimeError where the library is not
    there, or a CUDA call fails."""

    def __init__(self, down: torch.cuda.Stream, up: torch.cuda.Stream, slots: int) -> None:
        """slots: of all threads."""
        super().__init__()
        self.slots, self._library = slots, ctypes.CDLL(cuda_library.path())
        streams, error = map(ctypes.c_void_p, (down.cuda_stream, up.cuda_stream)), library.Error()
        make = self._library.tx_cuda_copies_make
        index, places = down.device_index, (ctypes.byref(self), ctypes.byref(error))
        library.check(make(ctypes.c_int32(index), *streams, ctypes.c_int64(slots), *places), error)

    def __del__(self) -> None:
        if hasattr(self, "_library"):
            self._library.tx_cuda_copies_free(ctypes.byref(self))  # of nothing where none was made


def copies_of(device: torch.device) -> HostCopies:
    """What the step on the host of parameters on this device copies with. ValueError where it cannot."""
    if device.type == "cpu":
        return HostCopies()
    if device.type == "cuda":
        return CudaCopies(device)
    raise ValueError(f"offload_fraction: parameters are on {device}; cpu and cuda are legal")


class Buffers:
    """Host memory for copies, made once: of the largest size that was asked for so far.

    torch does not know of the library's copies, and would give pinned memory to another user as soon as nothing refers
    to it: so it is freed, and the process exits, after they are done.
    """

    def __init__(self, copies: HostCopies, device: torch.device) -> None:
        self.copies, self.device = copies, device
        self._made: dict[Hashable, Tensor] = {}
        weakref.finalize(self, _finish, copies).atexit = False
        _finish_before_exit()
        _alive.add(self)

    def take(self, what: Hashable, nbytes: int) -> Tensor:
        """At least so many bytes; the same ones whenever the same is asked for."""
        made = self._made.get(what)
        if made is None or made.numel() < nbytes:
            if made is not None:
                self.copies.finish()  # its content may not have been sent yet
            made = self._made[what] = self.copies.buffer(nbytes)
        return made


_alive: "weakref.WeakSet[Buffers]" = weakref.WeakSet()


def _finish(copies: HostCopies) -> None:
    with contextlib.suppress(RuntimeError):  # a device that failed copies nothing any more
        copies.finish()


@functools.cache
def _finish_before_exit() -> None:
    """At exit, handlers run in the reverse order of their registration: ours ahead of those of torch, which is loaded
    and has a device by now."""

    def finish_all() -> None:
        for buffers in list(_alive):
            _finish(buffers.copies)

    atexit.register(finish_all)
