"""Flat buffers of parameters, for sharded strategies: a rank steps its parts, all-gathers write the rest in place."""

from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from torch_ext.comm.wire import ParamSlice
from torch_ext.parallel.bucket_plan import BucketPlan
from torch_ext.params.local_shard import LocalShard
from torch_ext.tensors import dense


class ParamBuffers:
    """The flat parameter buffers: one tensor for each buffer of the plan. The constructor copies the weights there and
    makes the parameters views of it."""

    def __init__(self, params: Sequence[torch.nn.Parameter], plan: BucketPlan) -> None:
        self.params, self.plan = params, plan
        device = params[0].device
        dtypes = {p.buffer: p.param_dtype for p in plan.parameters}
        self.flats = [
            torch.zeros(buckets[-1].start + buckets[-1].numel, dtype=dtypes[i], device=device)
            for i, buckets in enumerate(plan.buffers)
        ]
        self.buckets = [self.flats[b.buffer][b.start : b.start + b.numel] for b in plan.buckets]
        self._lent: list[StorageWeakRef] = []
        for param, planned in zip(params, plan.parameters, strict=True):
            view = dense.view_like(param, self.flats[planned.buffer], planned.start)
            view.copy_(param.detach())
            param.data = view

    def _holds(self, i: int) -> bool:
        """Whether parameter i still is in its buffer. If the buffer itself moves (share_memory()), so do its views."""
        param, planned = self.params[i], self.plan.parameters[i]
        flat = self.flats[planned.buffer]
        address = flat.data_ptr() + planned.start * flat.element_size()
        return not planned.numel or (param.dtype == planned.param_dtype and param.data_ptr() == address)

    def check(self, i: int) -> None:
        """Raises RuntimeError if parameter i no longer is in its buffer."""
        if not self._holds(i):
            raise RuntimeError(
                f"parameter {self.plan.parameters[i].name!r} left the flat buffer into which parallelize moved it "
                "(model.to(...), `p.data = ...`): the optimizer steps and all-gathers the buffer, not the new "
                "memory. Write into it (`p.copy_(...)` under no_grad), or convert the model before parallelize"
            )

    def local(self, i: int, owned: tuple[int, ParamSlice] | None, group: dist.ProcessGroup) -> LocalShard:
        """Returns what this rank steps of parameter i. owned: the bucket and the slice in this rank's part of it; None
        if this rank has nothing of it. Raises RuntimeError if the parameter left its buffer."""
        self.check(i)
        planned = self.plan.parameters[i]
        flat = self.flats[planned.buffer]
        if owned is None:
            return LocalShard(flat[:0], 0, (group,), planned.bucket)
        bucket, piece = owned
        begin = planned.start + piece.first
        return LocalShard(flat[begin : begin + piece.numel], piece.first, (group,), bucket)

    def give_own_storages(self, state_dict: MutableMapping[str, Any]) -> None:
        """Replaces a state dict's views of these buffers by tensors with the same memory and storages of their own.

        If tensors share one storage, Accelerate saves only one of them, with a warning (as if they were tied),
        safetensors refuses to save any, and torch.save saves the whole storage with each. Tied weights stay one tensor.
        """
        flats = {flat.untyped_storage().data_ptr() for flat in self.flats if flat.numel()}
        made: dict[tuple[Any, ...], Tensor] = {}
        for key, value in state_dict.items():
            if type(value) is Tensor and value.untyped_storage().data_ptr() in flats:
                place = (value.data_ptr(), value.dtype, value.shape, value.stride())
                if place not in made:
                    made[place] = torch.from_dlpack(value) if value.numel() else torch.empty_like(value)
                state_dict[key] = made[place]
        self._lent = [one for one in self._lent if not one.expired()]
        self._lent += (StorageWeakRef(value.untyped_storage()) for value in made.values())

    def refuse_lent(self, doing: str) -> None:
        """Raises RuntimeError if a tensor from `give_own_storages` still exists: its memory must not be offloaded."""
        if not all(one.expired() for one in self._lent):
            raise RuntimeError(
                f"{doing} while a state_dict() of the model, or a tensor of it, is still referenced: its memory is "
                "that of the weights. Delete it (del), or keep copies (clone)"
            )

    def release(self) -> None:
        """Copies every parameter to memory of its own."""
        for i, param in enumerate(self.params):
            if self._holds(i):
                param.data = param.detach().clone(memory_format=torch.preserve_format)
