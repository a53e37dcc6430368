"""The part of a parameter that this rank's optimizer updates: the whole parameter, a shard of a sharded strategy, or a
DTensor's local tensor."""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    import torch.distributed as dist


class LocalShard(NamedTuple):
    """The part of a parameter that this rank's optimizer updates."""

    weight: Tensor
    """The elements to update; may be empty."""
    offset: int
    """Index of the first of these elements in the logical parameter."""
    groups: "tuple[dist.ProcessGroup, ...]"
    """Process groups over which statistics of the gradients are all-reduced, one group after the other."""
    gather_bucket: int | None
    """The bucket whose weights are all-gathered after the step (GradientReducer.gather); None: no all-gather."""


def is_dtensor(t: Tensor) -> bool:
    """Whether t is a DTensor. Compares names of classes, because importing DTensor's module takes long."""
    return any(kind.__name__ == "DTensor" for kind in type(t).__mro__[:-1])


def is_flat_shard(p: Any, local: LocalShard) -> bool:
    """Whether this rank updates a flat part of p."""
    return local.weight is not p and not is_dtensor(p)


def tensor_of(p: Any) -> Tensor:
    """Returns a DTensor's local tensor; any other tensor as it is."""
    if not is_dtensor(p):
        return p
    with torch.no_grad():
        return p.to_local()


def of_dtensor(p: Any) -> LocalShard:
    """Returns the shard of a DTensor: its local tensor. Raises TypeError for a pending sum (Partial)."""
    weight = tensor_of(p)
    return LocalShard(weight, _offset(p, weight), _sharding_groups(p), None)


def _sharding_groups(p: Any) -> "tuple[dist.ProcessGroup, ...]":
    placements = p.placements
    if any(placement.is_partial() for placement in placements):
        raise TypeError(
            f"a DTensor with placements {tuple(placements)} is a pending sum (Partial): redistribute it first"
        )
    return tuple(
        p.device_mesh.get_group(dim) for dim, placement in enumerate(placements) if not placement.is_replicate()
    )


def _offset(p: Any, weight: Tensor) -> int:
    """Returns the index of the local tensor's first element in p; 0 if the local elements are not consecutive in p."""
    begin = origin(p)
    if not begin or weight.numel() == 0 or tuple(weight.shape[1:]) != tuple(p.shape[1:]):
        return 0
    return int(begin[0]) * (p.numel() // p.shape[0])


def runs_of_dtensor(p: Any) -> "list[tuple[int, int]] | None":
    """Returns the elements [begin, end) that each rank of a DTensor holds, as torch.chunk cuts them. None unless the
    DTensor is sharded on its first dimension, over exactly one dimension of the mesh."""
    sharded = [dim for dim, placement in enumerate(p.placements) if not placement.is_replicate()]
    if len(sharded) != 1 or not p.placements[sharded[0]].is_shard(0):
        return None
    ranks, rows = p.device_mesh.size(sharded[0]), p.shape[0]
    each, columns = -(-rows // ranks), p.numel() // max(rows, 1)
    return [(min(rank * each, rows) * columns, min((rank + 1) * each, rows) * columns) for rank in range(ranks)]


def origin(p: Any) -> tuple[int, ...]:
    """Returns the index, per dimension, at which a DTensor's local tensor begins."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
    return tuple(offset)
