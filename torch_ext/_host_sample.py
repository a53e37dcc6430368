"""Whether somebody else wrote to weights whose masters lie on the host: a sample of the weights is brought there."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_ext import _ops, _tensors
from torch_ext._host_batches import Layout
from torch_ext._plan import Member
from torch_ext._staging import Buffers

# A large parameter's sample is 16 of every 1024 elements, as in adamw_flat_; what is as small as this is compared whole.
_RUN, _STRIDE, _WHOLE = 16, 1024, 4096


class Sample:
    """Of weights beside fp32 masters, wherever those are: which of them are no longer what their master rounds to."""

    def __init__(self, members: Sequence[Member], buffers: Buffers) -> None:
        self._lanes = buffers.lanes
        weights = [_sampled(m.weight.detach(), m.weight) for m in members]
        self._there = [part for parts in weights for part in parts]
        self._masters = [part for m in members for part in _sampled(m.master, m.weight)]
        self._owner = [i for i, parts in enumerate(weights) for _ in parts]
        self._n = len(members)
        layout = Layout()
        ranges = [layout.place(t.numel(), t.dtype) for t in self._there]
        memory = buffers.take("sample", 0, layout.nbytes)
        self._here = [memory[where].view(t.dtype).view(t.shape) for t, where in zip(self._there, ranges, strict=True)]
        self._changed = torch.zeros(len(self._there), dtype=torch.int64)
        self._mark: Any = None
        self._brought = False

    def bring(self) -> None:
        """It leaves for the host."""
        self._lanes.down.copy(self._here, self._there)
        self._mark, self._brought = self._lanes.down.mark(), True

    def strays(self) -> list[bool]:
        """For each member; none strays where no sample was brought."""
        if not self._brought or not self._there:
            return [False] * self._n
        self._brought = False
        self._lanes.down.wait(self._mark)
        self._changed.zero_()
        # What is resynced is a copy of the masters: only the counts are of interest.
        copies = [master.clone(memory_format=torch.contiguous_format) for master in self._masters]
        _ops.call("master_resync_", self._here, copies, self._changed, False)
        found = [False] * self._n
        for owner, count in zip(self._owner, self._changed.tolist(), strict=True):
            found[owner] |= bool(count)
        return found


def _sampled(t: Tensor, weight: Tensor) -> list[Tensor]:
    """Views of what is compared of a weight, or of its master, which has the same memory order if the weight is dense."""
    if weight.numel() == 0:
        return []
    if weight.numel() <= _WHOLE or not _tensors.is_dense(weight):
        return [t]
    flat = _tensors.flat(t).view(-1)
    runs = flat.numel() // _STRIDE
    parts = [flat[: runs * _STRIDE].view(runs, _STRIDE)[:, :_RUN]]
    if flat.numel() % _STRIDE:
        parts.append(flat[runs * _STRIDE :][:_RUN])
    return parts
