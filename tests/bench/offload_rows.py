"""The contenders of the row `offload`: offload and onload of a model, and a plain copy of as many bytes."""

import time
from collections.abc import Callable

import torch
from torch import nn

from bench import optimizer_configs
from bench.optimizer_configs import CONFIGURATIONS
from bench.workload import Shapes
from torch_ext.offloading.offload import offload, onload

_PIECE = 1 << 30  # bytes of each of the plain copy's two memories, at most


class Trip:
    """Moves weights and states of the configuration "bf16" to the host and back. Gradients stay where they are: offload
    would only drop them."""

    def __init__(self, shapes: Shapes, seed: int) -> None:
        training = optimizer_configs.ours(CONFIGURATIONS["bf16"], shapes, seed)
        training.step()
        self._model, self._optimizer = nn.ParameterList(training.params), training.optimizer
        moved = [t for t in training.tensors() if t not in {p.grad for p in training.params} and t.dim()]
        self.nbytes = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in moved}.values())
        self.down: list[float] = []
        """Seconds of each offload, without the onload."""

    def there_and_back(self) -> None:
        begin = time.perf_counter()
        offload(self._model, self._optimizer, grads=False)
        self.down.append(time.perf_counter() - begin)
        onload(self._model, self._optimizer, grads=False)


def plain_copy(nbytes: int, fresh: bool) -> Callable[[], None]:
    """Returns a function that copies so many bytes to other memory and back, by Tensor.copy_, in pieces. fresh: the
    source is freed after the first copy and allocated again for the second, as offload does to make its memory
    available. Without an accelerator the time then includes the page faults of the new memory. Otherwise both memories
    are kept."""
    piece = min(nbytes, _PIECE)
    source, host = torch.ones(piece, dtype=torch.uint8), torch.zeros(piece, dtype=torch.uint8)
    sizes = [piece] * (nbytes // piece) + [nbytes % piece] * (nbytes % piece > 0)

    def copy() -> None:
        nonlocal source
        for size in sizes:
            host[:size].copy_(source[:size])
            if fresh:
                del source
                source = torch.empty(piece, dtype=torch.uint8)
            source[:size].copy_(host[:size])

    return copy
