"""The memory under tensors: each storage once, however many tensors are views of it."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class Memory(NamedTuple):
    """A storage that has memory now."""

    storage: torch.UntypedStorage
    nbytes: int
    name: str
    """Of the first tensor that was found to lie in it."""


def unwrapped(t: Tensor) -> Iterator[Tensor]:
    """The tensors with storages of their own that a tensor consists of: a DTensor's local tensor; itself of a plain
    one."""
    if hasattr(type(t), "__tensor_flatten__"):
        attributes, _ = t.__tensor_flatten__()  # type: ignore[attr-defined]
        for part in (getattr(t, attribute) for attribute in attributes):
            if isinstance(part, Tensor):  # a DTensor names its device mesh, too
                yield from unwrapped(part)
    else:
        yield t


def is_released(t: Tensor) -> bool:
    """Whether the tensor's storage is empty, so that its elements must not be read or written."""
    return t.numel() > 0 and t.untyped_storage().nbytes() == 0


def memories_of(named: Iterable[tuple[str, Tensor]]) -> dict[int, Memory]:
    """The storages of these tensors by address, without released ones, meta tensors and sparse ones."""
    memories: dict[int, Memory] = {}
    for name, tensor in named:
        for t in unwrapped(tensor):
            if not t.is_meta and t.layout is torch.strided:
                storage = t.untyped_storage()
                if storage.nbytes():
                    memories.setdefault(storage.data_ptr(), Memory(storage, storage.nbytes(), name))
    return memories


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """All of it as uint8, one dimension."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def refuse_fixed(memories: Iterable[Memory]) -> None:
    """RuntimeError, naming the tensor, where a storage cannot be released: its memory is not torch's alone."""
    for memory in memories:
        shared = memory.storage.device.type == "cpu" and memory.storage.is_shared()
        if shared or not memory.storage.resizable():
            others = "is shared with other processes (share_memory_())"
            how = others if shared else "is not torch's alone (`.numpy()`, from_numpy, a mapped file)"
            raise RuntimeError(
                f"offload cannot release {memory.name}: its memory {how}. Clone the tensor first, or leave it out"
            )
