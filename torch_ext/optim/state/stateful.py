"""What saving and loading ask of an optimizer; torch_ext.Adam has it."""

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from torch_ext.params.shard_map import ShardMap
from torch_ext.policy.policy import Policy


class StatefulOptimizer(Protocol):
    """An optimizer whose state at rest may be encoded, cut over the ranks, or on the host."""

    policy: Policy
    param_groups: list[dict[str, Any]]
    defaults: dict[str, Any]

    def current_shards(self, everyone: list[Tensor]) -> ShardMap:
        """Which part of each parameter lies on this rank."""
        ...

    def state_at_rest(self, p: Tensor) -> Mapping[str, Any]:
        """The state of p as it is kept, wherever it lies; empty where there is none."""
        ...

    def on_host(self, everyone: list[Tensor]) -> list[bool]:
        """Which parameters are stepped on the host (offload_fraction)."""
        ...
