"""Selects the elements of a model's parameters that this rank publishes. All ranks together publish each element once.

Note: without a collective. Each rank computes its selection alone, and all selections must fit together. A sharded
parameter is published as it is sharded. If several ranks hold the same elements, each publishes a share: the blocks of
all such parameters, in a row, are divided evenly among these ranks. Every rank computes the same boundaries.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from torch_ext.native import constants
from torch_ext.params import local_shard, reducer_registry
from torch_ext.params.local_shard import LocalShard, is_dtensor

_BLOCK = constants.CHECKSUM  # a share consists of whole checksum blocks, and so of whole blocks of all step records


class HeldWeights(NamedTuple):
    """A run of a parameter's elements in this rank's memory."""

    name: str
    param: Tensor
    local: Tensor
    """This rank's part of the parameter: what its optimizer steps."""
    offset: int
    """Index of the run's first element in the parameter."""
    begin: int
    """Index of the run's first element in `local`, a multiple of 1024."""
    weights: Tensor
    """The run's weights: contiguous, one dimension."""

    def cut(self, most: int) -> "list[HeldWeights]":
        """Returns the same elements as runs of at most `most` weights, a multiple of 1024."""
        edges = range(0, self.weights.numel(), most)
        cuts = [(at, self.weights[at : at + most]) for at in edges]
        return [self._replace(offset=self.offset + at, begin=self.begin + at, weights=part) for at, part in cuts]


class _Local(NamedTuple):
    """This rank's part of a parameter. `replicas` ranks hold the same part; this rank is number `replica`."""

    name: str
    param: Tensor
    shard: LocalShard
    replica: int
    replicas: int

    @property
    def blocks(self) -> int:
        return -(-self.shard.weight.numel() // _BLOCK)


def held_runs(params: Mapping[str, Tensor], part: int, parts: int) -> list[HeldWeights]:
    """Returns the runs that this rank publishes. params: the model's parameters by name. part: this rank's index among
    the `parts` ranks that train the model."""
    locals_ = [_local(name, p, part, parts) for name, p in params.items()]
    found: list[HeldWeights] = []
    for replicas in dict.fromkeys(one.replicas for one in locals_):
        found += _shares([one for one in locals_ if one.replicas == replicas], replicas)
    return found


def _local(name: str, p: Tensor, part: int, parts: int) -> _Local:
    owner = reducer_registry.owner_of(p)
    if is_dtensor(p):
        return _Local(name, p, _refuse_scattered(name, p), *_replica(p))
    if owner is not None and owner.sharded:
        return _Local(name, p, owner.local(p), 0, 1)
    return _Local(name, p, LocalShard(p, 0, (), None), part, parts)


def _replica(p: Any) -> tuple[int, int]:
    """Returns this rank's index among the ranks that hold the same elements of a DTensor, and their number."""
    place, count = 0, 1
    coordinates = p.device_mesh.get_coordinate()
    for dim, placement in enumerate(p.placements):
        if placement.is_replicate():
            size = p.device_mesh.size(dim)
            place, count = place * size + coordinates[dim], count * size
    return place, count


def _refuse_scattered(name: str, p: Any) -> LocalShard:
    """Returns the local shard of a DTensor. Raises ValueError unless its elements are contiguous in the parameter."""
    if any(type(placement).__name__ not in ("Shard", "Replicate") for placement in p.placements) or any(
        placement.is_shard() and placement.dim != 0 for placement in p.placements
    ):
        raise ValueError(
            f"{name!r} is sharded as {tuple(p.placements)}; Shard(0), as fully_shard makes it, and Replicate() can be "
            "published"
        )
    return local_shard.of_dtensor(p)


def _shares(locals_: Sequence[_Local], replicas: int) -> list[HeldWeights]:
    """Returns this rank's share of parameters that are replicated on `replicas` ranks."""
    total, before = sum(one.blocks for one in locals_), 0
    found = []
    for one in locals_:
        share = [total * edge // replicas - before for edge in (one.replica, one.replica + 1)]
        first, last = (min(max(edge, 0), one.blocks) * _BLOCK for edge in share)
        before += one.blocks
        weights = _flat(one)[first:last]
        if weights.numel():
            found.append(HeldWeights(one.name, one.param, one.shard.weight, one.shard.offset + first, first, weights))
    return found


def _flat(one: _Local) -> Tensor:
    """Returns this rank's part as one dimension. Raises ValueError unless it is contiguous."""
    weight = one.shard.weight.detach()
    if not weight.is_contiguous():
        raise ValueError(
            f"{one.name!r} has strides {weight.stride()} (channels_last?); contiguous parameters can be published"
        )
    return weight.view(-1)
