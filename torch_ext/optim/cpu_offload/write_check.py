"""Whether somebody else wrote to weights whose fp32 masters lie on the host.

Weights do not come down for a step then: of each a sample is looked at, the one that its checksum is of (TX_SAMPLED).
The operator does that where the device's memory is the host's. Elsewhere the sample is brought down and compared with
what the masters round to.
"""

import abc
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_ext.native import constants, ops
from torch_ext.optim.cpu_offload.copies import Buffers, Layout
from torch_ext.optim.state.param_state import ParamState
from torch_ext.tensors import dense


class Sample(abc.ABC):
    @abc.abstractmethod
    def bring(self) -> None:
        """It leaves for the host, to be looked at by the next `stale`."""

    @abc.abstractmethod
    def stale(self) -> list[bool]:
        """For each member, whether somebody else wrote to it; of nobody where no sample was brought."""


def sample_of(members: Sequence[ParamState], buffers: Buffers) -> Sample:
    """members: each with an fp32 master."""
    return ChecksumCheck(members) if buffers.copies.shared else Brought(members, buffers)


class ChecksumCheck(Sample):
    def __init__(self, members: Sequence[ParamState]) -> None:
        self._members = members
        self._wanted = False
        self._dense = all(dense.is_dense(m.weight) for m in members)
        self._masters = [dense.flat(m.master) for m in members]
        self._weights = self._flat()
        self._checksums = [m.state["checksum"] for m in members]
        self._found = torch.zeros(len(members), dtype=torch.int64)

    def _flat(self) -> list[Tensor]:
        return [dense.in_order_of(m.master, m.weight.detach()) for m in self._members]

    def bring(self) -> None:
        self._wanted = True

    def stale(self) -> list[bool]:
        if self._wanted and self._members:
            weights = self._weights if self._dense else self._flat()
            self._found.zero_()
            ops.look("master_checksum_", weights, self._masters, self._checksums, self._found, constants.CHECKSUM_CHECK)
            self._wanted = False
            return list(map(bool, self._found.tolist()))
        return [False] * len(self._members)


class Brought(Sample):
    def __init__(self, members: Sequence[ParamState], buffers: Buffers) -> None:
        self._copies = buffers.copies
        weights = [_sampled(m.weight.detach(), m.weight) for m in members]
        self._there = [part for parts in weights for part in parts]
        self._masters = [part for m in members for part in _sampled(m.master, m.weight)]
        self._owner = [i for i, parts in enumerate(weights) for _ in parts]
        self._n = len(members)
        layout = Layout()
        ranges = [layout.place(t.numel(), t.dtype) for t in self._there]
        memory = buffers.take("sample", layout.nbytes)
        self._here = [memory[where].view(t.dtype).view(t.shape) for t, where in zip(self._there, ranges, strict=True)]
        self._changed = torch.zeros(len(self._there), dtype=torch.int64)
        self._mark: Any = None

    def bring(self) -> None:
        self._copies.to_host(self._here, self._there)
        self._mark = self._copies.mark()

    def stale(self) -> list[bool]:
        found = [False] * self._n
        if self._mark is not None and self._there:
            self._copies.wait(self._mark)
            self._mark = None
            self._changed.zero_()
            masters = [master.contiguous() for master in self._masters]
            ops.look("master_resync_", self._here, masters, self._changed, False, True)  # only counts
            for owner, count in zip(self._owner, self._changed.tolist(), strict=True):
                found[owner] |= bool(count)
        return found


def _sampled(t: Tensor, weight: Tensor) -> list[Tensor]:
    """Views of what is compared of a weight, or of its master, which has the same memory order if the weight is
    dense."""
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
