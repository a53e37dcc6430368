"""Storages between the device and the host, in steps that can be undone: either all of a call moves, or nothing.

| | `store` | `release` | `allocate` | `load` |
|---|---|---|---|---|
| Offloaded: weights, states | copied to the host | freed on the device | allocated | copied from the host |
| Released: gradients | | freed | allocated | zeroed |

Until `release` nothing has changed that anybody could see, and until `load` has ended nothing is lost.
"""

import abc
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from torch_ext.offloading.host_buffer import HostBuffer
from torch_ext.tensors import host_copies, storage
from torch_ext.tensors.storage import Memory

_ALIGNMENT = 64  # bytes; a cache line


class _Piece(NamedTuple):
    memory: Memory
    offset: int  # in the host buffer

    @property
    def end(self) -> int:
        """Where the next one may begin."""
        return -(-(self.offset + self.memory.nbytes) // _ALIGNMENT) * _ALIGNMENT


class StorageTransfer(abc.ABC):
    """Storages of one kind, of one model or optimizer, that are offloaded or about to be."""

    def __init__(self) -> None:
        self._pending: list[_Piece] = []
        self._offloaded: list[_Piece] = []

    @abc.abstractmethod
    def _restore(self, pieces: Sequence[_Piece]) -> None:
        """Gives content to memory that was allocated anew."""

    def memories(self) -> Iterator[Memory]:
        """Those that are offloaded."""
        return (piece.memory for piece in self._offloaded)

    def store(self, memories: Iterable[Memory]) -> None:
        """These are to be offloaded, too. Copies are queued."""
        end = max((piece.end for piece in self._offloaded), default=0)
        for memory in memories:
            self._pending.append(_Piece(memory, end))
            end = self._pending[-1].end

    def release(self) -> None:
        """Frees what was stored; copies are done."""
        _free(self._pending)

    def commit(self) -> None:
        """Everything was released."""
        self._offloaded += self._pending
        self._pending = []

    def undo(self) -> None:
        """Brings back what was stored, released or not."""
        pending, self._pending = self._pending, []
        released = [piece for piece in pending if piece.memory.storage.nbytes() == 0]
        _allocate(released)
        self._restore(released)

    def allocate(self) -> None:
        """Makes memory for everything that is offloaded."""
        _allocate(self._offloaded)

    def load(self) -> None:
        """Gives it its content. Copies are queued."""
        self._restore(self._offloaded)

    def free(self) -> None:
        """Undoes `allocate`."""
        _free(self._offloaded)

    def finish(self) -> None:
        """Everything is on the device; copies are done."""
        self._offloaded = []


class Offloaded(StorageTransfer):
    """Storages whose content is kept in host memory, which stays allocated for the next time."""

    def __init__(self, pinned: bool) -> None:
        super().__init__()
        self._buffer = HostBuffer(pinned)

    def store(self, memories: Iterable[Memory]) -> None:
        super().store(memories)
        self._buffer.reserve(max((piece.end for piece in self._pending), default=0))
        self._buffer.store((offset, storage.bytes_of(memory.storage)) for memory, offset in self._pending)

    def _restore(self, pieces: Sequence[_Piece]) -> None:
        self._buffer.load((offset, storage.bytes_of(memory.storage)) for memory, offset in pieces)


class Released(StorageTransfer):
    """Storages of gradients, whose content is not kept. `.grad` is None meanwhile; afterwards it is the tensor that it
    was before, zero."""

    def __init__(self) -> None:
        super().__init__()
        self._grads: list[tuple[Tensor, Tensor]] = []  # parameters, and what was their `.grad`

    def _restore(self, pieces: Sequence[_Piece]) -> None:
        for memory, _ in pieces:
            storage.bytes_of(memory.storage).zero_()

    def hide_grads(self, params: Iterable[Tensor]) -> None:
        """The gradients of these parameters were released."""
        for param in params:
            if param.grad is not None:
                if param.grad.layout is torch.strided:  # a sparse one has no memory that could stay the same
                    self._grads.append((param, param.grad))
                param.grad = None

    def finish(self) -> None:
        super().finish()
        for param, grad in self._grads:
            if param.grad is None:  # else the caller has set another one
                param.grad = grad
        self._grads = []


def _free(pieces: Iterable[_Piece]) -> None:
    for memory, _ in pieces:
        memory.storage.resize_(0)


def _allocate(pieces: Iterable[_Piece]) -> None:
    for memory, _ in pieces:
        memory.storage.resize_(memory.nbytes)


# -- all of a call, or nothing ----------------------------------------------------------------------------------------

Move: TypeAlias = tuple[StorageTransfer, list[Memory]]


def offload_all(moves: Sequence[Move], devices: Iterable[torch.device]) -> None:
    """Raises RuntimeError, and has changed nothing, where there is not enough host memory or a copy fails."""
    try:
        for transfer, memories in moves:
            transfer.store(memories)
        host_copies.synchronize(devices)
        for transfer, _ in moves:
            transfer.release()
    except BaseException as error:
        for transfer, _ in moves:
            transfer.undo()
        host_copies.synchronize(devices)
        _raise("offload", error, (m for _, memories in moves for m in memories), "and nothing has moved")
        raise
    for transfer, _ in moves:
        transfer.commit()


def onload_all(transfers: Sequence[StorageTransfer], devices: Iterable[torch.device]) -> None:
    """Raises RuntimeError, with everything still offloaded, where the device has not enough memory or a copy fails."""
    try:
        for transfer in transfers:
            transfer.allocate()
        for transfer in transfers:
            transfer.load()
        host_copies.synchronize(devices)
    except BaseException as error:
        for transfer in transfers:
            transfer.free()
        _raise(
            "onload",
            error,
            (m for transfer in transfers for m in transfer.memories()),
            "and everything is in host memory still: make room on the device, or bring back less at a time (params, "
            "grads, states)",
        )
        raise
    for transfer in transfers:
        transfer.finish()


def _raise(doing: str, error: BaseException, memories: Iterable[Memory], outcome: str) -> None:
    if isinstance(error, (RuntimeError, MemoryError)):
        nbytes = sum(memory.nbytes for memory in memories)
        raise RuntimeError(f"{doing} of {nbytes} bytes failed, {outcome}: {error}") from error
