"""Copies between a device and the host that overlap with the work of both. Only this module of the step on the host
depends on the kind of device. `copies_of` makes the object for a device.
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
    """Copies for parameters that are in host memory themselves, and the interface of copies for other devices.

    A copy is done at once. More than one batch at a time would only take room in the cache."""

    shared = True
    """Whether the device's memory is the host's: then tensors that are only read need no copy."""
    slots = 1
    """How many batches each thread works on at a time."""
    numel = 1 << 15
    """Elements of a batch; a multiple of SAMPLED. A batch should stay in the second-level cache from its copy to its
    step and to the copy back, while the step's own reads and writes pass through that cache, too. Measured: 16 Ki to
    64 Ki elements do equally well, fewer or more are slower."""

    def buffer(self, nbytes: int) -> Tensor:
        """Returns host memory for copies: uint8 [nbytes], uninitialised."""
        return host_copies.allocate(nbytes, pinned=not self.shared)

    def begin(self) -> None:
        """Makes all later copies wait for the device work that was launched so far."""

    def to_host(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Starts copies of pairs of equal shapes, one after the other; any thread may call it. Sources and targets must
        stay as they are until `wait` has returned for a later mark."""
        host_copies.copy(zip(targets, sources, strict=True))

    def mark(self) -> Any:
        """Returns a mark that stands for every copy to the host that was started so far."""

    def wait(self, mark: Any) -> None:
        """Blocks the host until the copies of the mark are done."""

    def end(self) -> None:
        """Makes all device work that is launched from now on wait for every copy to the device."""

    def finish(self) -> None:
        """Blocks the host until every copy is done. Does not break another thread's capture of a CUDA graph."""

    def native(self, slots: int) -> int | None:
        """Returns the address of a tx_copy_ops for tx_adamw_offloaded with `slots` slots in all; it lives as long as
        this object. None: the thread that steps a batch copies it in host memory."""
        return None


class CudaCopies(HostCopies):
    """Copies for a CUDA device, with a stream for each direction."""

    shared = False
    slots = 3
    numel = 1 << 19  # a copy costs at least ten microseconds: copying a batch should take several times as long

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._down, self._up = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._ops: list[_CudaCopyOps] = []  # earlier ones, with fewer slots, are kept: they may have unfinished copies

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
    """A tx_copy_ops of the CUDA library, over two streams, which must outlive it. Raises RuntimeError where the library
    is missing, or a CUDA call fails."""

    def __init__(self, down: torch.cuda.Stream, up: torch.cuda.Stream, slots: int) -> None:
        """slots: of all threads together."""
        super().__init__()
        self.slots, self._library = slots, ctypes.CDLL(cuda_library.path())
        streams, error = map(ctypes.c_void_p, (down.cuda_stream, up.cuda_stream)), library.Error()
        make = self._library.tx_cuda_copies_make
        index, places = down.device_index, (ctypes.byref(self), ctypes.byref(error))
        library.check(make(ctypes.c_int32(index), *streams, ctypes.c_int64(slots), *places), error)

    def __del__(self) -> None:
        if hasattr(self, "_library"):
            self._library.tx_cuda_copies_free(ctypes.byref(self))  # does nothing where tx_cuda_copies_make has failed


def copies_of(device: torch.device) -> HostCopies:
    """Returns the copies for parameters on this device. ValueError for devices other than cpu and cuda."""
    if device.type == "cpu":
        return HostCopies()
    if device.type == "cuda":
        return CudaCopies(device)
    raise ValueError(f"offload_fraction: parameters are on {device}; cpu and cuda are legal")


class Buffers:
    """Host memory for copies, allocated once, in the largest size that was requested so far.

    torch does not know of the library's copies: as soon as nothing refers to pinned memory, it may give that to another
    user. So memory is freed, and the process exits, only after all copies are done.
    """

    def __init__(self, copies: HostCopies, device: torch.device) -> None:
        self.copies, self.device = copies, device
        self._made: dict[Hashable, Tensor] = {}
        weakref.finalize(self, _finish, copies).atexit = False
        _finish_before_exit()
        _alive.add(self)

    def take(self, what: Hashable, nbytes: int) -> Tensor:
        """Returns memory of at least `nbytes` bytes: the same memory in each call with the same `what`."""
        made = self._made.get(what)
        if made is None or made.numel() < nbytes:
            if made is not None:
                self.copies.finish()  # copies from the smaller memory may still be running
            made = self._made[what] = self.copies.buffer(nbytes)
        return made


_alive: "weakref.WeakSet[Buffers]" = weakref.WeakSet()


def _finish(copies: HostCopies) -> None:
    with contextlib.suppress(RuntimeError):  # raised if the device has failed; it copies nothing any more then
        copies.finish()


@functools.cache
def _finish_before_exit() -> None:
    """Registers an exit handler that finishes all copies. Handlers run in reverse order of registration: torch has
    registered its own already, so ours runs before them."""

    def finish_all() -> None:
        for buffers in list(_alive):
            _finish(buffers.copies)

    atexit.register(finish_all)
