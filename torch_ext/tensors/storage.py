"""Finds the storages under tensors; a storage with many views counts once."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class Memory(NamedTuple):
    """A storage that is not empty."""

    storage: torch.UntypedStorage
    nbytes: int
    name: str
    """Name of the first tensor that was found to use this storage."""


def unwrapped(t: Tensor) -> Iterator[Tensor]:
    """Yields the tensors that hold the memory of t: the local tensor of a DTensor, the parts of any other wrapper, or
    t itself if it is plain."""
    if hasattr(type(t), "__tensor_flatten__"):
        attributes, _ = t.__tensor_flatten__()  # type: ignore[attr-defined]
        for part in (getattr(t, attribute) for attribute in attributes):
            if isinstance(part, Tensor):  # __tensor_flatten__ of a DTensor lists its device mesh, too
                yield from unwrapped(part)
    else:
        yield t


def is_released(t: Tensor) -> bool:
    """Whether the tensor's storage is empty, so that its elements must not be read or written."""
    return t.numel() > 0 and t.untyped_storage().nbytes() == 0


def memories_of(named: Iterable[tuple[str, Tensor]]) -> dict[int, Memory]:
    """Returns the storages of these tensors by address, without empty ones. Meta and sparse tensors are skipped."""
    memories: dict[int, Memory] = {}
    for name, tensor in named:
        for t in unwrapped(tensor):
            if not t.is_meta and t.layout is torch.strided:
                storage = t.untyped_storage()
                if storage.nbytes():
                    memories.setdefault(storage.data_ptr(), Memory(storage, storage.nbytes(), name))
    return memories


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """Returns the whole storage as a 1-d uint8 tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def refuse_fixed(memories: Iterable[Memory]) -> None:
    """Raises RuntimeError, naming the tensor, if a storage cannot be released because others use its memory, too."""
    for memory in memories:
        shared = memory.storage.device.type == "cpu" and memory.storage.is_shared()
        if shared or not memory.storage.resizable():
            others = "is shared with other processes (share_memory_())"
            how = others if shared else "is not torch's alone (`.numpy()`, from_numpy, a mapped file)"
            raise RuntimeError(
                f"offload cannot release {memory.name}: its memory {how}. Clone the tensor first, or leave it out"
            )
