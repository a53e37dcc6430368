"""What moves bytes for `comm/collectives.py`: torch.distributed, or (transport="nccl") our own NCCL communicator."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist

from torch_ext.comm import group_calls
from torch_ext.comm.lost_ranks import refuse

GatherGroup: TypeAlias = Callable[[dist.ProcessGroup, torch.device], dist.ProcessGroup]
"""Of the same ranks as a group; collective."""


class TransportWork(Protocol):
    """A collective that was issued."""

    def wait(self) -> Any:
        """Makes the current stream wait for it; a CPU waits itself."""


class Transport(Protocol):
    """Messages are uint8 and contiguous; number, sizes and order are the same on all ranks. Collectives only start."""

    def all_to_all(self, into: Sequence[torch.Tensor], sent: Sequence[torch.Tensor], label: str) -> list[TransportWork]:
        """Part r of each message goes to rank r; part i of what is received is rank i's. Runs behind what is queued on
        the current stream."""

    def all_gather(self, whole: Sequence[torch.Tensor], rank: int, label: str) -> list[TransportWork]:
        """Gathers every rank's part of each message; this rank's is in its place already."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Memory for slots, uint8. Every rank asks for the same sizes, in one order."""

    def digest(self) -> torch.Tensor:
        """Of what was issued, uint8; ranks compare it in their reports. Empty where the back end does that itself."""

    def explain(self, tag: int) -> None:
        """Raises RuntimeError: in what ranks with different digests differ. Every rank calls it."""


class TorchTransport:
    """Through the process group: its watchdog, flight recorder and elastic restart keep working."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, in_place: bool, gather_group: GatherGroup | None = None
    ) -> None:
        """in_place: whether the back end's all-gather allows the own part to lie in the result. gather_group: makes the
        group of all-gathers, before the first collective; None: `group`."""
        self._group, self._device, self._in_place = group, device, in_place
        self._world_size = dist.get_world_size(group)
        self._make_gather_group = gather_group
        self._gather_group: dist.ProcessGroup | None = None

    def _of_gathers(self) -> dist.ProcessGroup:
        if self._gather_group is None:
            make, group = self._make_gather_group, self._group
            self._gather_group = group if make is None else make(group, self._device)
        return self._gather_group

    def all_to_all(self, into: Sequence[torch.Tensor], sent: Sequence[torch.Tensor], label: str) -> list[TransportWork]:
        self._of_gathers()  # is made before anything is under way
        return [
            group_calls.all_to_all_single(to, message, self._group, label)
            for to, message in zip(into, sent, strict=True)
        ]

    def all_gather(self, whole: Sequence[torch.Tensor], rank: int, label: str) -> list[TransportWork]:
        refuse(self._group, label)
        group = self._of_gathers()
        owns = [message.chunk(self._world_size)[rank] for message in whole]
        return [
            group_calls.all_gather_into_tensor(message, own if self._in_place else own.clone(), group, label)
            for message, own in zip(whole, owns, strict=True)
        ]

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def digest(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device="cpu")

    def explain(self, tag: int) -> None:
        raise AssertionError("empty digests do not differ")
