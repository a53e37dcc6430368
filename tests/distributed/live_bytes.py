"""Measures the memory that a stretch of code allocates, and the most of it that is in use at one time."""

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Within this mode, counts the bytes of storages that torch's operators allocate. `most`: the peak."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[StorageWeakRef, int] = {}
        self._old: dict[StorageWeakRef, None] = {}  # storages that existed before
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        for tensor in _tensors((args, kwargs)):
            if (ref := StorageWeakRef(tensor.untyped_storage())) not in self._sizes:
                self._old[ref] = None
        made = func(*args, **kwargs or {})
        for tensor in _tensors(made):
            if (ref := StorageWeakRef(tensor.untyped_storage())) not in self._old:
                self._sizes[ref] = tensor.untyped_storage().nbytes()
        self.most = max(self.most, self.now())
        return made

    def now(self) -> int:
        """Returns the bytes that are in use now."""
        self._sizes = {ref: size for ref, size in self._sizes.items() if not ref.expired()}
        return sum(self._sizes.values())


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [getattr(one, "_local_tensor", one) for one in tree_leaves(tree) if isinstance(one, torch.Tensor)]


def settled(live: LiveBytes, expected: int) -> int:
    """Returns the bytes in use, after up to 1 s for them to fall to `expected`: gloo's thread frees a message's memory
    shortly after the message is complete."""
    deadline = time.monotonic() + 1
    while live.now() > expected and time.monotonic() < deadline:
        time.sleep(0.01)
    return live.now()
