"""Transports send bytes for `comm/collectives.py`: torch.distributed's, or our own over NCCL (transport="nccl")."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist

from torch_ext.comm import group_calls
from torch_ext.comm.lost_ranks import refuse

GatherGroup: TypeAlias = Callable[[dist.ProcessGroup, torch.device], dist.ProcessGroup]
"""A function that returns a process group of the same ranks for all-gathers; collective."""


class TransportWork(Protocol):
    """An issued collective."""

    def wait(self) -> Any:
        """Makes the current stream wait for the collective; on a CPU, the calling thread."""


class Transport(Protocol):
    """The collectives that `comm/collectives.py` needs. Calls only start them. Messages are contiguous uint8 tensors;
    their number, sizes and order are the same on all ranks."""

    def all_to_all(self, into: Sequence[torch.Tensor], sent: Sequence[torch.Tensor], label: str) -> list[TransportWork]:
        """Sends part r of each message to rank r; part i of a received message comes from rank i. Runs after everything
        queued on the current stream."""

    def all_gather(self, whole: Sequence[torch.Tensor], rank: int, label: str) -> list[TransportWork]:
        """Gathers every rank's part of each message in place; this rank's part is already in `whole`."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Returns memory for slots, uint8. All ranks allocate the same sizes in the same order."""

    def digest(self) -> torch.Tensor:
        """Returns a digest of the issued operations, uint8, which ranks compare in their reports. Empty if the back end
        itself detects differing operations."""

    def explain(self, tag: int) -> None:
        """Raises RuntimeError that says in which operation ranks with different digests differ. Every rank calls it."""


class TorchTransport:
    """Sends messages through the process group: its watchdog, flight recorder and elastic restart keep working."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, in_place: bool, gather_group: GatherGroup | None = None
    ) -> None:
        """in_place: whether the input of the back end's all-gather may be a part of the output. gather_group: creates
        the group of all-gathers, before the first collective; None: `group` itself."""
        self._group, self._device, self._in_place = group, device, in_place
        self._world_size = dist.get_world_size(group)
        self._make_gather_group = gather_group
        self._gather_group: dist.ProcessGroup | None = None

    def _group_for_gathers(self) -> dist.ProcessGroup:
        if self._gather_group is None:
            make, group = self._make_gather_group, self._group
            self._gather_group = group if make is None else make(group, self._device)
        return self._gather_group

    def all_to_all(self, into: Sequence[torch.Tensor], sent: Sequence[torch.Tensor], label: str) -> list[TransportWork]:
        self._group_for_gathers()  # creates the group while no operation is running
        return [
            group_calls.all_to_all_single(to, message, self._group, label)
            for to, message in zip(into, sent, strict=True)
        ]

    def all_gather(self, whole: Sequence[torch.Tensor], rank: int, label: str) -> list[TransportWork]:
        refuse(self._group, label)
        group = self._group_for_gathers()
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
