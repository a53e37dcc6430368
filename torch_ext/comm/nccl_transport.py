"""transport="nccl": sends buckets over an NCCL communicator of our own, on a stream of its own.

The communicator is created at the first bucket, after all ranks have compared their plans. The ranks' reports
(CollectiveCommunicator) contain a digest of the issued operations: ranks that issued different collectives get an error
that names the bucket, instead of waiting for each other. A watchdog aborts operations that do not complete in time, and
the next call raises. Without the watchdog a hang would go unnoticed, since no host waits for the device.

With create_all_gather_group, all-gathers use a second communicator and stream, see Note [gathers of their own] in
csrc/nccl/nccl_comm.h. Both communicators are created, recorded and aborted together.
"""

import ctypes
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from torch_ext.comm import collectives
from torch_ext.comm.communicator import AGREEMENT_TAG, Communicator
from torch_ext.comm.process_group import timeout_of
from torch_ext.comm.streams import Event, Stream, Streams
from torch_ext.comm.transport import TransportWork
from torch_ext.native import graph_capture, nccl


class _Issued(NamedTuple):
    """An operation that was queued on a stream."""

    streams: Streams
    event: Event
    label: str
    begin: float

    def wait(self) -> None:
        self.streams.wait(self.streams.current(), self.event)


class Watchdog:
    """Polls the running operations, oldest first, on a thread of its own, and aborts the communicator after a
    timeout."""

    PERIOD = 1.0

    def __init__(self, streams: Streams, comm: nccl.Comm, timeout: float) -> None:
        self._streams, self._comm, self._timeout = streams, comm, timeout
        self._under_way: deque[_Issued] = deque()
        self._ended = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, name="torch_ext watchdog", daemon=True).start()

    def watch(self, issued: _Issued) -> None:
        self._under_way.append(issued)

    def poll(self, now: float) -> bool:
        """Polls once. Returns False when there is nothing to watch any more, because the communicator has failed."""
        unseen = ""
        try:
            while self._under_way and self._streams.query(self._under_way[0].event):
                self._under_way.popleft()
        except RuntimeError as error:  # the next poll may succeed; a persistent failure ends in the timeout
            unseen = f"; its event could not be queried: {error}"
        try:
            self._comm.check()
        except RuntimeError:
            return False  # the next operation raises this error
        if self._under_way and now > self._under_way[0].begin + self._timeout:
            self._comm.abort(
                f"{self._under_way[0].label} was not done after {self._timeout:g} s, the process group's timeout: a "
                f"rank was lost, or is that far behind{unseen}"
            )
            return False
        return True

    def end(self) -> None:
        self._ended.set()

    def _run(self) -> None:
        try:
            with self._streams.polling():
                while not self._ended.wait(self.PERIOD) and self.poll(time.monotonic()):
                    pass
        except Exception as error:  # without a watchdog a lost rank would never be noticed
            self._comm.abort(f"its watchdog failed: {error}")


class NcclTransport:
    """Sends messages over an NCCL communicator of our own; see the module's docstring. There is one per process group
    and value of create_all_gather_group, so that all communicators of a model issue operations in one order."""

    def __init__(
        self,
        control: Communicator,
        device: torch.device,
        streams: Streams,
        timeout: float,
        create_all_gather_group: bool = False,
    ) -> None:
        """control: a communicator between the hosts of the same ranks. timeout: seconds after which a missing rank is
        an error. create_all_gather_group: from the policy."""
        self._control, self._device, self._streams, self._timeout = control, device, streams, timeout
        self._stream = streams.new()
        self._gather_stream = streams.new() if create_all_gather_group else None
        self._before = streams.event()
        self._comm: nccl.Comm | None = None
        self._watchdog: Watchdog | None = None

    def _made(self) -> nccl.Comm:
        """Returns the communicator. The first call creates it, and is collective: rank 0 sends its id to all ranks."""
        if self._comm is None:
            wanted = 1 if self._gather_stream is None else 2
            makes = self._control.rank == 0
            mine = b"".join(nccl.unique_id() if makes else bytes(nccl.ID_BYTES) for _ in range(wanted))
            payload = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
            ids = self._control.all_gather_bytes(payload, tag=AGREEMENT_TAG, label="the communicator's id")()
            found = bytes(ids[0].tolist())
            gathers: dict[str, Any] = {}
            if self._gather_stream is not None:
                gathers = {"gather_id": found[nccl.ID_BYTES :], "multiprocessors": self._streams.multiprocessors()}
            with self._streams.device():
                self._comm = nccl.Comm(
                    found[: nccl.ID_BYTES], self._control.rank, self._control.world_size, self._timeout, **gathers
                )
            self._watchdog = Watchdog(self._streams, self._comm, self._timeout)
            self._watchdog.start()
            weakref.finalize(self, _close, self._comm, self._watchdog).atexit = False
        return self._comm

    def all_to_all(self, into: Sequence[torch.Tensor], sent: Sequence[torch.Tensor], label: str) -> list[TransportWork]:
        messages = [
            nccl.Message(s.data_ptr(), i.data_ptr(), s.nbytes // self._control.world_size)
            for i, s in zip(into, sent, strict=True)
        ]
        return self._issue(self._made().all_to_all, messages, label, self._stream)

    def all_gather(self, whole: Sequence[torch.Tensor], rank: int, label: str) -> list[TransportWork]:
        messages = []
        for message in whole:
            part = message.nbytes // self._control.world_size
            messages.append(nccl.Message(message.data_ptr() + rank * part, message.data_ptr(), part))
        return self._issue(self._made().all_gather, messages, label, self._gather_stream or self._stream)

    def _issue(
        self,
        call: Callable[[str, Sequence[nccl.Message], int], None],
        messages: Sequence[nccl.Message],
        label: str,
        stream: Stream,
    ) -> list[TransportWork]:
        """Queues an operation on the stream, after everything queued so far on the current stream, and watches it."""
        assert self._watchdog is not None
        self._streams.record(self._before, self._streams.current())
        self._streams.wait(stream, self._before)
        call(label, messages, self._streams.pointer(stream))
        issued = _Issued(self._streams, self._streams.event(), label, time.monotonic())
        self._streams.record(issued.event, stream)
        if not graph_capture.is_capturing(self._device):  # an event that a graph captured cannot be queried
            self._watchdog.watch(issued)
        return [issued]

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Returns memory that NCCL can write to directly. All ranks allocate the same sizes in the same order."""
        address = self._made().allocate(nbytes)
        if self._device.type == "cpu":
            return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
        return torch.as_tensor(_Raw(address, nbytes, self), device=self._device)

    # -- which ranks issued what

    def digest(self) -> torch.Tensor:
        """Returns the digest of the issued operations, uint8 [16]; equal on ranks that issued the same."""
        words = (0, 0) if self._comm is None else self._comm.digest()
        return torch.tensor(words, dtype=torch.int64, device="cpu").view(torch.uint8)

    def explain(self, tag: int) -> None:
        """Aborts the communicator and raises RuntimeError that names the first operation in which ranks differ. Every
        rank calls it."""
        comm = self._made()
        payload = torch.frombuffer(bytearray(comm.records()), dtype=torch.uint8)
        gathered = self._control.all_gather_bytes(payload, tag=tag, label="records of what was exchanged")()
        try:
            nccl.compare([bytes(r.tolist()) for r in gathered])
        except RuntimeError as error:
            comm.abort(str(error))
            raise
        raise RuntimeError(
            "ranks issued different operations: the first difference is older than the records that are kept"
        )


class _Raw:
    """Wraps an address in device memory for torch.as_tensor; keeps the transport, which owns the memory, alive."""

    def __init__(self, address: int, nbytes: int, owner: NcclTransport) -> None:
        self._owner = owner
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _close(comm: nccl.Comm, watchdog: Watchdog) -> None:
    watchdog.end()
    comm.abort("its process group is gone")


_transports: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[bool, NcclTransport]]" = weakref.WeakKeyDictionary()


def transport_of(
    group: dist.ProcessGroup, device: torch.device, streams: Streams, create_all_gather_group: bool
) -> NcclTransport:
    """Returns the transport of a process group. The first call for a group is collective."""
    made = _transports.setdefault(group, {})
    if create_all_gather_group not in made:
        control = collectives.control_communicator(group, device)
        made[create_all_gather_group] = NcclTransport(
            control, device, streams, timeout_of(group, device), create_all_gather_group
        )
    return made[create_all_gather_group]


def refuse(name: str, device: torch.device) -> None:
    """Raises ValueError for an unknown transport, or one that does not support the device; RuntimeError if NCCL is
    missing."""
    if name not in ("torch", "nccl"):
        raise ValueError(f"transport is {name!r}; legal are 'torch' and 'nccl'")
    if name == "nccl":
        if device.type != "cuda":
            raise ValueError(f"transport='nccl' moves memory of GPUs, and the model is on {device}; legal is 'torch'")
        nccl.find()
