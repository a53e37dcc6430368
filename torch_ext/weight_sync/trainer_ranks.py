"""The ranks that train a model together, and the chain's name that they agree on when a publisher is created."""

import os
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torch_ext.comm import group_calls
from torch_ext.params import reducer_registry
from torch_ext.params.local_shard import is_dtensor


class TrainerRanks(NamedTuple):
    """The ranks that train a model together."""

    part: int
    """This rank's index among them."""
    parts: int
    group: Any
    """A torch.distributed.ProcessGroup; None if this process trains alone."""

    def new_chain(self, device: torch.device) -> tuple[int, int]:
        """Returns 128 random bits, the same on all ranks, as two words: the name of a chain. This is the only
        collective of a publisher."""
        words = torch.frombuffer(bytearray(os.urandom(16)), dtype=torch.int64).clone().to(device)
        if self.group is not None:
            group_calls.broadcast(words, self.group, "WeightPublisher(): the name of a chain")
        first, second = (int(word) % (1 << 64) for word in words.tolist())
        return first, second


def ranks_of(model: torch.nn.Module, params: Iterable[Tensor], process_group: Any) -> TrainerRanks:
    """Returns the ranks that train the model. process_group: as given to `WeightPublisher`. Raises ValueError if
    gradients of some parameters are reduced over other ranks than those of the group."""
    params = list(params)
    owners = list(reducer_registry.owners_of(params))
    group = process_group
    if group is None and isinstance(model, torch.nn.parallel.DistributedDataParallel):
        group = model.process_group
    if group is None and (owners or any(map(is_dtensor, params))):
        group = dist.group.WORLD
    if group is None:
        return TrainerRanks(0, 1, None)
    members = frozenset(dist.get_process_group_ranks(group))
    for owner in owners:
        if owner.ranks != members:
            raise ValueError(
                f"process_group has ranks {sorted(members)}, and gradients of the model are reduced over "
                f"{sorted(owner.ranks)}: pass the group that parallelize was given"
            )
    return TrainerRanks(dist.get_rank(group), len(members), group)
