"""Host copies of the tensors that a publisher reads from a device, in memory that is kept between versions."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_ext.tensors import host_copies

_ALIGNMENT = 64  # bytes, for the loops that read the copies


class HostStage:
    """Copies tensors to the host and back, all together on their device's current stream, with one wait each way."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns each tensor on the host: itself if it is there, else a copy that is valid until the next call.
        tensors: contiguous."""
        away = [t for t in tensors if not t.is_cpu]
        sizes = [-(-t.nbytes // _ALIGNMENT) * _ALIGNMENT for t in away]
        if sum(sizes) > self._memory.numel():
            self._memory = host_copies.allocate(sum(sizes), pinned=True)
        places = torch.split(self._memory[: sum(sizes)], sizes) if away else ()
        copies = [p[: t.nbytes].view(t.dtype).view(t.shape) for p, t in zip(places, away, strict=True)]
        host_copies.copy_and_wait(zip(copies, away, strict=True))
        found = iter(copies)
        return [t if t.is_cpu else next(found) for t in tensors]

    @staticmethod
    def take_back(tensors: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
        """Copies the contents of `copies`, which `to_host` returned, to their tensors."""
        pairs = [(t, copy) for t, copy in zip(tensors, copies, strict=True) if t is not copy]
        host_copies.copy_and_wait(pairs)
