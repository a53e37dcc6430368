"""The collectives that FSDP2 calls instead of its own ones (set_custom_reduce_scatter, set_custom_all_gather).

Both only start their collective. FSDP2 waits for an all-gather when it needs the weights, so that one unit computes
while the next unit's weights are gathered. Reduce-scatters are waited for at the end of backward.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from torch_ext.comm.communicator import Work
from torch_ext.comm.streams import Stream

if TYPE_CHECKING:
    from torch_ext.parallel.fsdp.fsdp_reducer import FSDPReducer
    from torch_ext.parallel.fsdp.param_gather import ParamGather
    from torch_ext.parallel.fsdp.reduce_scatter import UnitPlan


class _Comm:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Called by FSDP2 for a buffer of one collective."""
        return torch.empty(*size, dtype=dtype, device=device)


class ReduceScatter(_Comm):
    """The reduce-scatter of one unit, by torch's protocol of the same name."""

    def __init__(self, reducer: "FSDPReducer", unit: "UnitPlan") -> None:
        self._reducer, self._unit = reducer, unit
        self._allocated_on: set[Stream] = set()

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        # FSDP2 allocates the input on the computation's stream and frees it as soon as __call__ returns. __call__ runs
        # on another stream, whose events do not cover the computation's: so the computation's is recorded, too.
        self._allocated_on.add(self._reducer.exchange.communicators.current_stream())
        return super().allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> None:
        allocated_on, self._allocated_on = self._allocated_on, set()
        self._reducer.reduce_scatter(self._unit, output_tensor, input_tensor, group, op, allocated_on)


class AllGather(_Comm):
    """The all-gather of one unit's weights, by torch's protocol of the same name."""

    def __init__(self, weights: "ParamGather", unit: "UnitPlan") -> None:
        self._weights, self._unit = weights, unit

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self._weights.refuse_offloaded()  # before FSDP2 reads the shards
        return super().allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work:
        handle = self._weights.all_gather(self._unit, output_tensor, input_tensor, group)
        return Gathering(self._weights, self._unit, handle)


class Gathering(dist.Work):
    """Handle of an all-gather of weights. FSDP2 waits for it with and without async_op."""

    def __init__(self, weights: "ParamGather", unit: "UnitPlan", handle: Work) -> None:
        super().__init__()
        self._weights, self._unit, self._handle = weights, unit, handle

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._weights.gathered(self._unit, self._handle)
        return True
