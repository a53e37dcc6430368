"""Who moves bytes for `comm/collectives.py`: torch.distributed, or (transport="nccl") this library's own
communicator."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from torch_ext.comm import group_calls


class TransportWork(Protocol):
    """Bytes on their way."""

    def wait(self) -> Any:
        """What the current stream is given from here on finds them there; a CPU waits."""


class Transport(Protocol):
    """Messages are uint8, contiguous; all ranks give the same ones in the same order. Both only start."""

    def all_to_all(self, into: Sequence[torch.Tensor], sent: Sequence[torch.Tensor], label: str) -> list[TransportWork]:
        """Part r of each message goes to rank r, whose i-th part comes from rank i. Reads and writes behind what the
        current stream was given so far."""

    def all_gather(self, whole: Sequence[torch.Tensor], rank: int, label: str) -> list[TransportWork]:
        """Brings every rank's part of each message to all; this rank's lies in its place."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Memory of slots, uint8: every rank asks for the same, in one order."""

    def digest(self) -> torch.Tensor:
        """Of what was issued, uint8; ranks add it to their reports. Empty where the back end sees to that itself."""

    def explain(self, tag: int) -> None:
        """RuntimeError: in what ranks with different digests differ. Every rank calls it."""


class TorchTransport:
    """Through the process group: its watchdog, flight recorder and elastic restart keep working."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, in_place: bool) -> None:
        """in_place: whether the back end gathers where the own part lies in the result."""
        self._group, self._device, self._in_place = group, device, in_place
        self._world_size = dist.get_world_size(group)

    def all_to_all(self, into: Sequence[torch.Tensor], sent: Sequence[torch.Tensor], label: str) -> list[TransportWork]:
        return [
            group_calls.all_to_all_single(to, message, self._group, label)
            for to, message in zip(into, sent, strict=True)
        ]

    def all_gather(self, whole: Sequence[torch.Tensor], rank: int, label: str) -> list[TransportWork]:
        owns = [message.chunk(self._world_size)[rank] for message in whole]
        return [
            group_calls.all_gather_into_tensor(message, own if self._in_place else own.clone(), self._group, label)
            for message, own in zip(whole, owns, strict=True)
        ]

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def digest(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def explain(self, tag: int) -> None:
        raise AssertionError("empty digests do not differ")
