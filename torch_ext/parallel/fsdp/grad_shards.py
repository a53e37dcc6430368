"""The gradient shards of a model sharded by FSDP2, between backwards. A shard is in main_grads_dtype and has the shape
of the parameter's local tensor. If the parameter has this dtype, too, `.grad` is a DTensor over the shard; else `.grad`
is None.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from torch_ext.native import ops
from torch_ext.parallel.fsdp.reduce_scatter import Reduction, Slice, UnitPlan
from torch_ext.params.local_shard import tensor_of


class GradShards:
    """The gradient shards of one reducer's parameters. `i` is a parameter's position."""

    def __init__(self, params: Sequence[torch.nn.Parameter], units: Sequence[UnitPlan], unit_of: Sequence[int]) -> None:
        self.params, self.units, self._unit_of = params, units, list(unit_of)
        self._shards: dict[int, torch.Tensor] = {}
        self._grads: dict[int, Any] = {}  # `.grad` of visible shards
        self.added: set[int] = set()
        """Parameters to whose shards this backward has added sums."""
        self._new: set[int] = set()  # parameters that had no shard before this backward

    def visible(self, i: int) -> bool:
        """Whether the shard of parameter i is also its `.grad`, which must have the parameter's dtype."""
        return self.params[i].dtype == self.units[self._unit_of[i]].main_grads_dtype

    def of(self, i: int) -> torch.Tensor | None:
        """Returns the gradient that a step reads for parameter i, or None."""
        if not self.visible(i):
            return self._shards.get(i)
        grad = self.params[i].grad
        return None if grad is None else tensor_of(grad)

    @property
    def memory(self) -> list[torch.Tensor]:
        """The tensors that hold gradients."""
        return list(self._shards.values())

    def dtype_of_sums(self, unit: UnitPlan) -> torch.dtype:
        """Returns the dtype for a unit's next sums. The first sum becomes the shard itself; later ones are added to it,
        so they stay in fp32 until then."""
        first = not any(self._unit_of[i] == unit.number for i in self._shards)
        return unit.main_grads_dtype if first else torch.float32

    def belongs(self, i: int, unit: UnitPlan) -> None:
        """Records that the unit contains parameter i. This is known only when FSDP2 reduces it: for several modules in
        one unit, FSDP2 uses the collectives of any of them."""
        self._unit_of[i] = unit.number

    def forget(self, i: int) -> None:
        self._shards.pop(i, None)
        self._grads.pop(i, None)

    def detach_grads(self) -> list[int]:
        """Removes `.grad` when a backward begins: FSDP2 would accumulate into it before the sums are written. A `.grad`
        that the user assigned goes into the shard. Returns the parameters whose `.grad` the user dropped."""
        self.added, self._new = set(), set()
        gone = []
        for i, param in enumerate(self.params):
            if param.grad is None and i not in self._grads:
                continue
            grad, param.grad = param.grad, None
            if grad is None:
                self.forget(i)
                gone.append(i)
            elif grad is not self._grads.get(i):
                self._adopt(i, grad)
        return gone

    def _adopt(self, i: int, grad: Any) -> None:
        local = tensor_of(grad)
        if self.visible(i):
            self._shards[i], self._grads[i] = local, grad
        elif i in self._shards:
            self._accumulate([(i, local)])
        else:
            self._shards[i] = local.to(self.units[self._unit_of[i]].main_grads_dtype)

    def drop_new(self, unused: Iterable[int]) -> None:
        """Drops the shards of parameters that no rank used, which hold zeros, if they are new in this backward."""
        for i in self._new.intersection(unused):
            self.forget(i)
            self.params[i].grad = None

    def attach_grads(self) -> None:
        """Restores `.grad` of visible shards after a backward."""
        for i, grad in self._grads.items():
            self.params[i].grad = grad

    def add_sums(self, reduction: Reduction, guarded: Callable[[Callable[[], None]], None]) -> None:
        """Waits for a reduction's sums, which become the shards or are added to them. guarded: calls its argument and
        records a failure."""
        reduction.wait(guarded)
        if not reduction.slices and reduction.unit.replicas > 1:
            return  # FSDP2 keeps the sum back for a later backward (set_requires_all_reduce)
        self._check_covered(reduction)
        reduction.is_added = True
        later: list[tuple[int, torch.Tensor]] = []
        for one in reduction.slices:
            value = reduction.sum_of(one, tensor_of(self.params[one.param]).shape)
            if one.param in self._shards:
                later.append((one.param, value))
            else:
                self._first(one, value)
        self._accumulate(later)
        self.added.update(one.param for one in reduction.slices)

    def _first(self, one: Slice, value: torch.Tensor) -> None:
        """Makes `value`, the sum of a slice, the shard of a parameter that has none."""
        self._new.add(one.param)
        if not self.visible(one.param):
            self._shards[one.param] = value.to(self.units[self._unit_of[one.param]].main_grads_dtype)
            return
        local = tensor_of(one.grad)
        if local.data_ptr() != value.data_ptr():
            local.copy_(value)
        self._shards[one.param], self._grads[one.param] = local, one.grad

    def _accumulate(self, values: Sequence[tuple[int, torch.Tensor]]) -> None:
        values = [(i, value) for i, value in values if value.numel() > 0]
        if values:
            ops.call("bucket_accumulate_", [self._shards[i] for i, _ in values], [value for _, value in values])

    def _check_covered(self, reduction: Reduction) -> None:
        """Raises RuntimeError if FSDP2 reduced a parameter that is not this reducer's: it would get no gradient."""
        end = 0
        for one in sorted(reduction.slices, key=lambda s: s.begin):
            if one.begin != end:
                break
            end += _padded_numel(self.params[one.param])
        if end != reduction.output.numel():
            raise RuntimeError(
                f"FSDP2 reduced a parameter of {reduction.unit} that parallelize did not plan for: it was frozen "
                "then, or it is another tensor now (load_state_dict(assign=True), Module.to): call parallelize "
                "again after such a change"
            )


def _padded_numel(param: Any) -> int:
    """Returns the numel of the largest rank's shard, to which FSDP2 pads all shards."""
    # In `placements` tensor parallelism comes after FSDP2, but it cut the parameter first.
    sharding = [(i, placement) for i, placement in enumerate(param.placements) if not placement.is_replicate()]
    if not sharding:
        return int(tensor_of(param).numel())
    (mesh_dim, first), *others = sharding
    rows = param.shape[first.dim]
    for other_dim, other in others:
        if other.dim == first.dim:
            rows = -(-rows // param.device_mesh.size(other_dim))
    shape = list(tensor_of(param).shape)
    shape[first.dim] = -(-rows // param.device_mesh.size(mesh_dim))
    return torch.Size(shape).numel()
