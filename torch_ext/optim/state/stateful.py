"""The interface of an optimizer and its parameters that saving and loading use. torch_ext.Adam implements it."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

from torch import Tensor

from torch_ext.optim.state.averaging import Averaging
from torch_ext.optim.state.state_dtypes import StateDtypes
from torch_ext.params import local_shard, param_groups
from torch_ext.params.shard_map import ShardMap
from torch_ext.policy.policy import Policy


class StatefulOptimizer(Protocol):
    """An optimizer whose stored state may be encoded, sharded over the ranks, or on the host."""

    policy: Policy
    averaging: Averaging
    param_groups: list[dict[str, Any]]
    defaults: dict[str, Any]

    def current_shards(self, all_params: list[Tensor]) -> ShardMap:
        """Returns which part of each parameter this rank has."""
        ...

    def stored_state(self, p: Tensor) -> Mapping[str, Any]:
        """Returns the stored state of p (see `state_dtypes`), from opt.state or from the host; empty where there is
        none."""
        ...

    def refuse_hyper(self, group: dict[str, Any], where: str) -> None:
        """Raises for hyper-parameters that are not legal in a group. where: for messages."""
        ...

    def on_host(self, all_params: list[Tensor]) -> list[bool]:
        """Returns for each parameter whether it is stepped on the host (offload_fraction)."""
        ...


class StatefulParam:
    """A parameter of an optimizer, and its state. Properties are computed on first use, since the policy may have no
    dtypes for a parameter without state."""

    def __init__(
        self, optimizer: StatefulOptimizer, shards: ShardMap, index: int, name: str, kept: bool, matrix: bool
    ) -> None:
        self._optimizer, self._shards, self.index, self.kept, self._matrix = optimizer, shards, index, kept, matrix
        self.param: Any = shards.params[index]
        self.name = name
        """For messages."""

    @cached_property
    def local(self) -> local_shard.LocalShard:
        return self._shards.of(self.index)

    @cached_property
    def kinds(self) -> StateDtypes:
        kinds = StateDtypes.of(self._optimizer.policy, self.param.dtype, self.param.numel(), self.kept, self._matrix)
        return kinds.with_average(self._optimizer.averaging.dtype, self.param.dtype, self.name)

    @cached_property
    def stored(self) -> Mapping[str, Any]:
        return self._optimizer.stored_state(self.param)

    @property
    def flat_shard(self) -> bool:
        """Whether this rank steps a flat part of the parameter."""
        return local_shard.is_flat_shard(self.param, self.local)


def params_of(optimizer: StatefulOptimizer) -> list[StatefulParam]:
    """Returns all parameters, in the order of their indices in a state_dict."""
    groups = optimizer.param_groups
    names, kept = param_groups.names(groups), param_groups.kept_32bit(groups)
    matrices = param_groups.are_matrices(groups)
    shards = optimizer.current_shards(param_groups.all_params(groups))
    return [
        StatefulParam(optimizer, shards, index, name, kept[index], matrices[index]) for index, name in enumerate(names)
    ]


def first_names(names: Sequence[str], limit: int = 4) -> str:
    """Returns up to `limit` names and how many more there are, as text for messages."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
