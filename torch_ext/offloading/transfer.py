"""Moves storages between the device and the host. A call moves either all of its storages or none.

| | `store` | `restore`, into newly allocated memory |
|---|---|---|
| Offloaded: weights, states | copies to the host | copies from the host |
| Released: gradients | | fills with zeros |
"""

import abc
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from torch_ext.offloading.host_buffer import HostBuffer
from torch_ext.tensors import dense, host_copies, storage
from torch_ext.tensors.storage import Memory


class Piece(NamedTuple):
    """An offloaded storage and its offset in the host buffer, in bytes."""

    memory: Memory
    offset: int

    @property
    def end(self) -> int:
        """The offset at which the next piece may begin."""
        return dense.aligned(self.offset + self.memory.nbytes)


class StorageTransfer(abc.ABC):
    """The offloaded storages (`pieces`) of one kind, of one model or optimizer."""

    keeps_content: bool

    def __init__(self) -> None:
        self.pieces: list[Piece] = []

    def store(self, memories: Iterable[Memory]) -> list[Piece]:
        """Returns pieces for more storages, placed after the current ones. Copies are only queued; nothing is freed."""
        pieces, end = [], self.pieces[-1].end if self.pieces else 0
        for memory in memories:
            pieces.append(Piece(memory, end))
            end = pieces[-1].end
        return pieces

    @abc.abstractmethod
    def restore(self, pieces: Sequence[Piece]) -> None:
        """Fills newly allocated memory with its content. Copies are only queued."""

    def finish(self) -> None:
        """Forgets the pieces. Called when everything is on the device and the copies are done."""
        self.pieces = []


class Offloaded(StorageTransfer):
    """Storages whose content is kept in host memory. The host memory stays allocated for the next offload."""

    keeps_content = True

    def __init__(self, pinned: bool) -> None:
        super().__init__()
        self._buffer = HostBuffer(pinned)

    def store(self, memories: Iterable[Memory]) -> list[Piece]:
        pieces = super().store(memories)
        self._buffer.reserve(pieces[-1].end if pieces else 0)
        self._buffer.store((offset, storage.bytes_of(memory.storage)) for memory, offset in pieces)
        return pieces

    def restore(self, pieces: Sequence[Piece]) -> None:
        self._buffer.load((offset, storage.bytes_of(memory.storage)) for memory, offset in pieces)


class Released(StorageTransfer):
    """Storages of gradients, whose content is not kept. `.grad` is None while they are freed; afterwards it is the same
    tensor as before, filled with zeros."""

    keeps_content = False

    def __init__(self) -> None:
        super().__init__()
        self._grads: list[tuple[Tensor, Tensor]] = []  # parameters and their previous `.grad`

    def restore(self, pieces: Sequence[Piece]) -> None:
        for memory, _ in pieces:
            storage.bytes_of(memory.storage).zero_()

    def hide_grads(self, params: Iterable[Tensor]) -> None:
        """Sets `.grad` to None for parameters whose gradients were freed, and remembers the gradients."""
        for param in params:
            if param.grad is not None:
                if param.grad.layout is torch.strided:  # a sparse gradient has no storage to be restored
                    self._grads.append((param, param.grad))
                param.grad = None

    def finish(self) -> None:
        super().finish()
        for param, grad in self._grads:
            if param.grad is None:  # else the caller has set another gradient
                param.grad = grad
        self._grads = []


def free(pieces: Iterable[Piece]) -> None:
    for memory, _ in pieces:
        memory.storage.resize_(0)


def allocate(pieces: Iterable[Piece]) -> None:
    for memory, _ in pieces:
        memory.storage.resize_(memory.nbytes)


Move: TypeAlias = tuple[StorageTransfer, list[Memory]]


def offload_all(moves: Sequence[Move], devices: Iterable[torch.device], before_freeing: Callable[[], None]) -> None:
    """Offloads all storages, or raises RuntimeError with nothing changed: if host memory is short or a copy fails.
    before_freeing: called when the copies are done and before the first storage is freed."""
    before = [transfer.pieces for transfer, _ in moves]
    stored: list[list[Piece]] = []
    try:
        for transfer, memories in moves:
            stored.append(transfer.store(memories))
        host_copies.synchronize(devices)
        before_freeing()
        for keeps_content in (True, False):  # gradients last: after an error their content could not be restored
            for (transfer, _), pieces in zip(moves, stored, strict=True):
                if transfer.keeps_content == keeps_content:
                    transfer.pieces = [*transfer.pieces, *pieces]
                    free(pieces)
    except BaseException as error:
        if are_offloaded(moves):  # an interrupt after the last storage was freed
            raise
        for (transfer, _), pieces, earlier in zip(moves, stored, before, strict=False):
            freed = [piece for piece in pieces if piece.memory.storage.nbytes() == 0]
            allocate(freed)
            transfer.restore(freed)
            transfer.pieces = earlier
        host_copies.synchronize(devices)
        _raise("offload", error, (m for _, memories in moves for m in memories), "and nothing has moved")
        raise


def are_offloaded(moves: Sequence[Move]) -> bool:
    """Whether `offload_all` has freed all storages."""
    return all(memory.storage.nbytes() == 0 for _, memories in moves for memory in memories)


def onload_all(transfers: Sequence[StorageTransfer], devices: Iterable[torch.device]) -> None:
    """Brings back all storages, or raises RuntimeError with everything still offloaded: if device memory is short or a
    copy fails."""
    try:
        for transfer in transfers:
            allocate(transfer.pieces)
        for transfer in transfers:
            transfer.restore(transfer.pieces)
        host_copies.synchronize(devices)
    except BaseException as error:
        for transfer in transfers:
            free(transfer.pieces)
        outcome = (
            "and everything is in host memory still: make room on the device, or bring back less at a time (params, "
            "grads, states)"
        )
        _raise("onload", error, (piece.memory for transfer in transfers for piece in transfer.pieces), outcome)
        raise


def _raise(doing: str, error: BaseException, memories: Iterable[Memory], outcome: str) -> None:
    if isinstance(error, (RuntimeError, MemoryError)):
        nbytes = sum(memory.nbytes for memory in memories)
        raise RuntimeError(f"{doing} of {nbytes} bytes failed, {outcome}: {error}") from error
