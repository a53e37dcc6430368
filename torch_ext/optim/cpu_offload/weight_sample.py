"""Finds weights that were modified outside the optimizer, among those whose fp32 masters are on the host.

Such weights are not copied down for a step. Instead a sample of each is compared: the elements that its checksums cover
(TX_SAMPLED). `CopiedSample` copies the sample down and compares it with the rounded masters. Where the device's memory
is the host's, `ChecksumSample` reads the weights in place, since with copies a step takes 1.27 times as long there (8
tensors of 2^20 elements in bf16, one thread).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_ext.native import constants, ops
from torch_ext.optim.cpu_offload.copies import Buffers
from torch_ext.optim.state.param_state import ParamState
from torch_ext.tensors import dense


def sample_of(members: Sequence[ParamState], buffers: Buffers) -> "CopiedSample | ChecksumSample":
    """Returns the sample for the members' device. members: each with an fp32 master."""
    return ChecksumSample(members) if buffers.copies.shared else CopiedSample(members, buffers)


class CopiedSample:
    """A sample that is copied to the host and compared with the masters."""

    def __init__(self, members: Sequence[ParamState], buffers: Buffers) -> None:
        self._members, self._copies = members, buffers.copies
        weights = [_sampled(m.weight.detach(), m.weight) for m in members]
        self._owner = [i for i, parts in enumerate(weights) for _ in parts]
        self._on_device = [part for parts in weights for part in parts]
        self._masters = [part for m in members for part in _sampled(m.master, m.weight)]
        offsets, nbytes = dense.aligned_offsets(t.nbytes for t in self._on_device)
        memory = buffers.take("sample", nbytes)
        self._on_host = [
            memory[at : at + t.nbytes].view(t.dtype).view(t.shape)
            for t, at in zip(self._on_device, offsets, strict=True)
        ]
        self._stale = torch.zeros(len(offsets), dtype=torch.int64, device="cpu")
        self._copied: Any = None

    def take(self) -> None:
        """Starts to copy the sample to the host; the next `stale` compares it."""
        self._copies.to_host(self._on_host, self._on_device)
        self._copied = self._copies.mark()

    def stale(self) -> list[ParamState]:
        """Returns the members with a sampled element that its master does not round to; none if no sample was taken."""
        if self._copied is None or not self._on_device:
            return []
        self._copies.wait(self._copied)
        self._copied = None
        self._stale.zero_()
        masters = [master.contiguous() for master in self._masters]
        ops.call_unversioned("master_resync_", self._on_host, masters, self._stale, False, True)  # only counts
        found = {owner for owner, count in zip(self._owner, self._stale.tolist(), strict=True) if count}
        return [self._members[i] for i in sorted(found)]


class ChecksumSample:
    """A sample that is read in place and compared with the checksums."""

    def __init__(self, members: Sequence[ParamState]) -> None:
        self._members, self._taken = members, False
        self._dense = all(dense.is_dense(m.weight) for m in members)
        self._masters = [dense.flat(m.master) for m in members]
        self._weights = self._flat()
        self._checksums = [m.state["checksum"] for m in members]
        self._stale = torch.zeros(len(members), dtype=torch.int64, device="cpu")

    def _flat(self) -> list[Tensor]:
        return [dense.in_order_of(m.master, m.weight.detach()) for m in self._members]

    def take(self) -> None:
        """Makes the next `stale` compare the weights."""
        self._taken = True

    def stale(self) -> list[ParamState]:
        """Returns the members whose weights do not have their checksums; none if no sample was taken."""
        if not self._taken or not self._members:
            return []
        self._taken = False
        self._stale.zero_()
        weights = self._weights if self._dense else self._flat()
        ops.call_unversioned(
            "master_checksum_", weights, self._masters, self._checksums, self._stale, constants.CHECKSUM_CHECK
        )
        return [m for m, count in zip(self._members, self._stale.tolist(), strict=True) if count]


def _sampled(t: Tensor, weight: Tensor) -> list[Tensor]:
    """Returns views of the sampled elements of t: a weight, or its master, whose memory order is the same if the weight
    is dense."""
    if weight.numel() == 0:
        return []
    if weight.numel() <= constants.SAMPLED or not dense.is_dense(weight):
        return [t]
    flat = dense.flat(t).view(-1)
    run, stride = constants.SAMPLE_RUN, constants.SAMPLE_STRIDE
    runs = flat.numel() // stride
    parts = [flat[: runs * stride].view(runs, stride)[:, :run]]
    if flat.numel() % stride:
        parts.append(flat[runs * stride :][:run])
    return parts
