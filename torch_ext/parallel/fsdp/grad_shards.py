"""The gradient shards of a model sharded by FSDP2, between backwards: in main_grads_dtype, each of its local tensor's
shape. Where that is the parameter's dtype, `.grad` is a DTensor over the shard; else `.grad` is None.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from torch_ext.native import ops
from torch_ext.parallel.fsdp.reduce_scatter import Reduction, Slice, UnitPlan
from torch_ext.params.local_shard import tensor_of


class GradShards:
    """Positions i are those of the parameters."""

    def __init__(self, params: Sequence[torch.nn.Parameter], units: Sequence[UnitPlan], unit_of: Sequence[int]) -> None:
        self.params, self.units, self._unit_of = params, units, list(unit_of)
        self._shards: dict[int, torch.Tensor] = {}
        self._grads: dict[int, Any] = {}  # the DTensors
        self.added: set[int] = set()
        """Parameters whose sums of this backward are in the shards."""
        self._new: set[int] = set()  # parameters whose shards are this backward's sums

    def visible(self, i: int) -> bool:
        """Whether the shard can be `.grad`, which has the parameter's dtype."""
        return self.params[i].dtype == self.units[self._unit_of[i]].main_grads_dtype

    def of(self, i: int) -> torch.Tensor | None:
        """The gradient that a step reads, or None."""
        if not self.visible(i):
            return self._shards.get(i)
        grad = self.params[i].grad
        return None if grad is None else tensor_of(grad)

    @property
    def memory(self) -> list[torch.Tensor]:
        """Where gradients lie."""
        return list(self._shards.values())

    def dtype_of_sums(self, unit: UnitPlan) -> torch.dtype:
        """The first sum of a cycle becomes the shard; later ones are added to it, and not rounded before."""
        first = not any(self._unit_of[i] == unit.number for i in self._shards)
        return unit.main_grads_dtype if first else torch.float32

    def belongs(self, i: int, unit: UnitPlan) -> None:
        """The unit has parameter i: of several modules of one unit, FSDP2 uses the collectives of any."""
        self._unit_of[i] = unit.number

    def forget(self, i: int) -> None:
        self._shards.pop(i, None)
        self._grads.pop(i, None)

    def detach_grads(self) -> list[int]:
        """A backward begins, in which FSDP2 would accumulate into `.grad` before the sums are written. A `.grad` that
        the user assigned is taken over; returns the parameters whose `.grad` the user dropped."""
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
        """Drops sums of zeros, of parameters that no rank used, where there was no gradient before."""
        for i in self._new.intersection(unused):
            self.forget(i)
            self.params[i].grad = None

    def attach_grads(self) -> None:
        """A backward ended: `.grad` of visible shards is there again."""
        for i, grad in self._grads.items():
            self.params[i].grad = grad

    def add_sums(self, reduction: Reduction, guarded: Callable[[Callable[[], None]], None]) -> None:
        """Waits for the sums, which become the shards or are added to them. guarded: calls its argument."""
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
        """RuntimeError where FSDP2 reduces a parameter that this reducer does not know: it would get no gradient."""
        end = 0
        for one in sorted(reduction.slices, key=lambda s: s.begin):
            if one.begin != end:
                break
            end += _padded_numel(self.params[one.param])
        if end != reduction.output.numel():
            raise RuntimeError(
                f"FSDP2 reduced a parameter of {reduction.unit} that parallelize did not see: it was "
                "frozen then, or it is another tensor now (load_state_dict(assign=True), Module.to): call parallelize "
                "again after such a change"
            )


def _padded_numel(param: Any) -> int:
    """Of the largest rank's shard, to which all are padded."""
    # Those of tensor parallelism come after FSDP2's, and were made before it.
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
