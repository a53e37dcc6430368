"""The step of a batch on the host: one call of tx_adamw, made on the thread that steps the batch.

Past torch's operators, since several threads do that beside each other: what torch does to hand a call over, it does
with the interpreter's lock.
"""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_ext import _arguments, _header, _library
from torch_ext._arguments import AdamWArguments, TensorArgument
from torch_ext._host_batches import SplitScales
from torch_ext._host_stages import Stage


class Counters:
    """What the calls of each slot count: threads don't share one."""

    def __init__(self, slots: int) -> None:
        self._counts = (ctypes.c_int64 * (2 * slots))()
        begin, step = ctypes.addressof(self._counts), 2 * ctypes.sizeof(ctypes.c_int64)
        self.at = [
            tuple(_arguments.counter(begin + step * slot + at) for at in (0, step // 2)) for slot in range(slots)
        ]
        """For each slot: the steps that were skipped, the elements whose master became the weight."""

    def zero(self) -> None:
        ctypes.memset(self._counts, 0, ctypes.sizeof(self._counts))

    def skipped(self, slot: int) -> bool:
        return bool(self._counts[2 * slot])

    @property
    def resynced(self) -> int:
        return sum(self._counts[1::2])


class Settings(NamedTuple):
    """What is the same for all batches of a step."""

    groups: Tensor  # of Hyper
    lrs: list[Tensor]
    shared: tuple[int, int, int]
    scalars: Sequence[Tensor]  # grad_scale, clip_coef, found_inf
    external: int  # tx_external_write, of weights that come down

    def after(self, last: "Settings") -> "Settings":
        """These, with the groups where the last step's were, if they have room there."""
        if self.groups.nbytes != last.groups.nbytes:
            return self
        ctypes.memmove(last.groups.data_ptr(), self.groups.data_ptr(), self.groups.nbytes)
        return self._replace(groups=last.groups)

    def key(self) -> tuple[object, ...]:
        """Equal where calls need not be told again."""
        pointed = [(t.data_ptr(), t.numel(), t.dtype) for t in (self.groups, *self.lrs, *self.scalars)]
        return self.shared, self.external, *pointed


class Call:
    def __init__(
        self, rows: list[list[Tensor | None]], meta: list[list[int]], scales: list[SplitScales], comes_down: bool
    ) -> None:
        """rows: the state of each piece (see Member.at_rest); meta: rows of tx_meta. scales: brought together before
        the step. All must stay where they are. comes_down: whether the weight does; there writes by others are noticed.
        """
        self._held, self._scales, self.comes_down = rows, scales, comes_down
        self._meta = torch.tensor(meta, dtype=torch.int64)
        self._arguments = AdamWArguments(len(rows))
        self._arguments.point_states(rows)
        self._arguments.meta = self._meta.data_ptr()
        self._address = ctypes.addressof(self._arguments)
        self._adamw = _arguments.adamw()

    def set(self, settings: Settings) -> None:
        """From here on. What it holds must stay."""
        to = self._arguments
        to.n_groups, to.groups = len(settings.groups), settings.groups.data_ptr()
        to.point("lrs", settings.lrs)
        to.seed, to.moment_rounding, to.weight_rounding = settings.shared
        to.grad_scale, to.clip_coef, to.found_inf = map(_arguments.argument, settings.scalars)
        to.on_external_write = settings.external if self.comes_down else _header.EXTERNAL_IGNORE

    def run(self, stage: Stage, counters: tuple[TensorArgument, ...], error: _library.Error) -> int:
        """Steps what lies in the stage. Returns the status, and leaves its message in `error`."""
        to = self._arguments
        to.params, to.grads = ctypes.addressof(stage.weights), ctypes.addressof(stage.grads)
        to.skipped, to.resynced = counters
        for scales in self._scales:
            scales.load()
        status = self._adamw(self._address, None, ctypes.addressof(error))
        for scales in self._scales:
            scales.store()
        return status
