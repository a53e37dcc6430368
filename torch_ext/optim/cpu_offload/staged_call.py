"""The step on the host of the parameters of one bucket: one call of tx_adamw_offloaded.

It is not a torch operator: these need all their tensors on one device.
"""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_ext.native import adamw_args, library
from torch_ext.native.adamw_args import AdamWArguments
from torch_ext.optim.cpu_offload import staged_args
from torch_ext.optim.cpu_offload.copies import Buffers
from torch_ext.optim.state.averaging import Averaging


class Counters:
    """The counters that all calls of a step add to."""

    def __init__(self) -> None:
        self._counts = (ctypes.c_int64 * 2)()
        begin = ctypes.addressof(self._counts)
        self.arguments = tuple(adamw_args.counter(begin + at) for at in (0, ctypes.sizeof(ctypes.c_int64)))

    def zero(self) -> None:
        self._counts[:] = [0, 0]

    @property
    def skipped(self) -> bool:
        """Whether the step was skipped."""
        return bool(self._counts[0])

    @property
    def resynced(self) -> int:
        """The number of elements whose master was reset to the weight."""
        return self._counts[1]


class Settings(NamedTuple):
    """The arguments that are the same for all calls of a step."""

    groups: Tensor  # of Hyper
    lrs: list[Tensor]
    shared: tuple[int, int, int]
    scalars: Sequence[Tensor]  # grad_scale, clip_coef, found_inf
    external: int  # tx_external_write, for weights that are copied down


class Call:
    """The arguments of one call, kept from step to step."""

    def __init__(
        self,
        weights: list[Tensor],
        rows: list[list[Tensor | None]],
        meta: list[list[int]],
        counters: Counters,
        averaging: Averaging,
    ) -> None:
        """weights: dense memory, on any device. rows: the state of each (ParamState.stored), on the host. meta: rows of
        tx_meta. The memory of all of them must not move."""
        self._held, self._weights = rows, weights
        self._meta = torch.tensor(meta, dtype=torch.int64, device="cpu")
        self._arguments = to = AdamWArguments(len(rows))
        to.point_states(rows)
        self._params = (adamw_args.TensorArgument * len(rows))(*map(adamw_args.device_argument, weights))
        self._grads = (adamw_args.TensorArgument * len(rows))()
        to.params, to.grads = ctypes.addressof(self._params), ctypes.addressof(self._grads)
        to.meta = self._meta.data_ptr()
        to.skipped, to.resynced = counters.arguments
        to.ema_decay, to.ema_every = averaging.decay, averaging.every
        self._staging = staged_args.Staging(ctypes.sizeof(staged_args.Staging))

    def prepare(self, grads: Sequence[Tensor], settings: Settings) -> None:
        """Sets the gradients and settings for `run`. grads: dense memory on the weights' device, which must stay until
        then. Raises the library's error where it would reject `run`; the error has the parameter's index, not its
        name."""
        to, error = self._arguments, library.Error()
        self._settings = settings  # keeps alive the memory to which the arguments point
        self._grads[:] = list(map(adamw_args.device_argument, grads))
        to.n_groups, to.groups = len(settings.groups), settings.groups.data_ptr()
        to.point("lrs", settings.lrs)
        to.seed, to.moment_rounding, to.weight_rounding = settings.shared
        to.grad_scale, to.clip_coef, to.found_inf = map(adamw_args.argument, settings.scalars)
        to.on_external_write = settings.external
        self._widest = tuple(max(t.element_size() for t in tensors) for tensors in (grads, self._weights))
        library.check(adamw_args.adamw_check()(ctypes.addressof(to), ctypes.addressof(error)), error)

    def run(self, buffers: Buffers) -> None:
        """Makes the call. The step may be skipped (see Counters). Weights may still be being copied to the device when
        it returns. Raises the library's error where a copy fails."""
        to, staging, threads, error = self._arguments, self._staging, staged_args.threads(), library.Error()
        copies, slots = buffers.copies, buffers.copies.slots * threads.num_threads
        # Separate memory for each size of slots: the previous call's weights may still be being copied from its slots.
        memory = buffers.take(("batches", *self._widest), slots * copies.numel * sum(self._widest))
        staging.copy_ops = copies.native(slots)
        staging.memory, staging.bytes = memory.data_ptr(), memory.nbytes
        staging.batch, staging.slots = copies.numel, copies.slots
        status = staged_args.adamw_offloaded()(*map(ctypes.addressof, (to, staging, threads, error)))
        library.check(status, error)
