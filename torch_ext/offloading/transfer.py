"""Memories on their way to the host and back: in two steps each way, so that a way that fails can be gone back.

| | `pack` | `release` | `allocate` | `fill` |
|---|---|---|---|---|
| Offloaded: weights, states | copied to the host | the device's memory goes | and comes | copied from the host |
| Released: gradients | | likewise | likewise | zeroed |

Until `release` nothing has changed that anybody could see, and until `fill` nothing has been lost.
"""

import abc
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_ext.offloading.host_buffer import HostBuffer
from torch_ext.tensors import storage
from torch_ext.tensors.storage import Memory


class _Piece(NamedTuple):
    memory: Memory
    at: int  # of the host buffer


class StorageTransfer(abc.ABC):
    def __init__(self) -> None:
        self._packed: list[_Piece] = []
        self._away: list[_Piece] = []

    @abc.abstractmethod
    def _fill(self, pieces: Sequence[_Piece]) -> None:
        """Memories that came get their content."""

    def memories(self) -> Iterator[Memory]:
        """Those that are away."""
        return (piece.memory for piece in self._away)

    def pack(self, memories: Iterable[Memory]) -> None:
        """These are about to go, too."""
        end = max((_end(piece) for piece in self._away), default=0)
        for memory in memories:
            self._packed.append(_Piece(memory, end))
            end = _end(self._packed[-1])

    def release(self) -> None:
        """What was packed goes; copies are done."""
        for memory, _ in self._packed:
            memory.storage.resize_(0)

    def settle(self) -> None:
        """Everything was released."""
        self._away += self._packed
        self._packed = []

    def take_back(self) -> None:
        """What was packed, released or not, is here."""
        packed, self._packed = self._packed, []
        gone = [piece for piece in packed if piece.memory.storage.nbytes() == 0]
        for memory, _ in gone:
            memory.storage.resize_(memory.nbytes)
        self._fill(gone)

    def allocate(self) -> None:
        """Memory for everything that is away."""
        for memory, _ in self._away:
            memory.storage.resize_(memory.nbytes)

    def free(self) -> None:
        """What was allocated goes again."""
        for memory, _ in self._away:
            memory.storage.resize_(0)

    def fill(self) -> None:
        self._fill(self._away)

    def arrived(self) -> None:
        """Everything is here; copies are done."""
        self._away = []


class Offloaded(StorageTransfer):
    """Memories that come back as they were. The host buffer stays for the next time."""

    def __init__(self, pinned: bool) -> None:
        super().__init__()
        self.buffer = HostBuffer(pinned)

    def pack(self, memories: Iterable[Memory]) -> None:
        super().pack(memories)
        self.buffer.reserve(max(map(_end, self._packed), default=0))
        self.buffer.store((at, storage.bytes_of(memory.storage)) for memory, at in self._packed)

    def _fill(self, pieces: Sequence[_Piece]) -> None:
        self.buffer.load((at, storage.bytes_of(memory.storage)) for memory, at in pieces)


class Released(StorageTransfer):
    """Gradients, whose content is not kept. `.grad` is None as long as they are away; afterwards the tensors that were
    there before are there again, zero."""

    def __init__(self) -> None:
        super().__init__()
        self._aside: list[tuple[Tensor, Tensor]] = []  # parameters and what was their `.grad`

    def _fill(self, pieces: Sequence[_Piece]) -> None:
        for memory, _ in pieces:
            storage.bytes_of(memory.storage).zero_()

    def set_aside(self, params: Iterable[Tensor]) -> None:
        """Of these parameters the gradients were released."""
        for param in params:
            if param.grad is not None:
                if param.grad.layout is torch.strided:  # a sparse one has no memory that could stay the same
                    self._aside.append((param, param.grad))
                param.grad = None

    def arrived(self) -> None:
        super().arrived()
        for param, grad in self._aside:
            if param.grad is None:  # else somebody put one there
                param.grad = grad
        self._aside = []


def _end(piece: _Piece) -> int:
    """Where the next one may begin: at a cache line."""
    return -(-(piece.at + piece.memory.nbytes) // 64) * 64
