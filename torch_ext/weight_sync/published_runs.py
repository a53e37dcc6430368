"""The runs of weights that a rank publishes. A run is a contiguous piece of a parameter in this rank's memory. Runs are
prepared once and cached for as long as all tensors keep their addresses."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_ext.native import adamw_args, constants
from torch_ext.optim.optimizer_base import OptimizerBase
from torch_ext.optim.state.weight_changes import KEYS, WeightChanges
from torch_ext.optim.state.write_check import FixedMemory
from torch_ext.params.shard_map import ShardMap
from torch_ext.weight_sync import delta_library
from torch_ext.weight_sync.held_weights import HeldWeights, held_runs
from torch_ext.weight_sync.model_table import ModelTable

_PER_ITEM = {"changed": 8, "moved": constants.BLOCK, "distance": 2}  # weights per element of the tensors in `kept`

_SHORT = 1 << 20
"""The most weights in a run that no step changes. All such runs share zeros for `changed` and `moved`, of this size."""


class Run(NamedTuple):
    """A run of weights, and what is recorded about it."""

    held: HeldWeights
    kept: dict[str, Tensor]
    """Views of what steps recorded about these weights (see `weight_changes`)."""
    checksums: Tensor
    """Checksums of the last published weights, on the host."""


class _CachedRuns(NamedTuple):
    """Runs that are valid as long as `_cache_key` stays equal and no memory has moved."""

    seen: object
    """`_cache_key` when the runs were created."""
    runs: list[Run]
    memory: FixedMemory
    """The runs' memory: offloaded tensors return to other addresses."""
    rows: Any
    """The runs as an array of tx_delta_run; None unless all of their memory is on the host."""


class PublishedRuns:
    """The runs that this rank publishes, and their checksums."""

    def __init__(
        self, optimizer: OptimizerBase, model: ModelTable, changes: WeightChanges, part: int, parts: int
    ) -> None:
        """part: this rank's index among the `parts` ranks that train the model."""
        self._optimizer, self._model, self._changes = optimizer, model, changes
        self._part, self._parts = part, parts
        self._nothing: dict[str, Tensor] = {}  # zeros in place of a step's records, shared by runs that no step changes
        self._untrained = self.not_stepped()
        self._checksums: dict[tuple[str, int], Tensor] = {}  # by parameter and offset
        self._layout = _layout(self._held())
        self._cached: _CachedRuns | None = None
        self._shards: ShardMap | None = None  # of the model's parameters

    def layout_changed(self) -> bool:
        """Whether this rank now holds other runs than when this object was created."""
        return not self._cache_is_valid() and _layout(self._held()) != self._layout

    def _cache_key(self) -> object:
        """Returns a value that stays equal as long as the same parameters are stepped, and parameters, their shards and
        the steps' records stay in the same memory."""
        states, params = self._optimizer._states, list(self._model.params.values())
        if self._shards is None or not self._shards.fits(params):
            self._shards = ShardMap(params)
        all_params = states.all_params()
        trained = [p.requires_grad or states.has_state(p) for p in all_params]
        where, on_host = self._shards.memory(), states.on_host(all_params)
        return self._shards, where, list(map(id, all_params)), trained, on_host, self._changes.generation

    def _held(self) -> list[HeldWeights]:
        """Returns this rank's weights in the order of the table. Parameters that were not stepped when this object was
        created are cut into short runs."""
        found = []
        for h in held_runs(self._model.params, self._part, self._parts):
            found += h.cut(_SHORT) if h.name in self._untrained else [h]
        return sorted(found, key=lambda h: (self._model.order[h.name], h.offset))

    def _cache_is_valid(self) -> bool:
        known = self._cached
        return known is not None and self._cache_key() == known.seen and known.memory.unchanged()

    def current_runs(self) -> list[Run]:
        """Returns the current runs, recreated if something has moved."""
        if self._cached is None or not self._cache_is_valid():
            runs = self._create_runs()
            memory = [t for run in runs for t in (run.held.weights, *run.kept.values())]
            here = all(t.is_cpu for t in memory)
            rows = self.rows(runs, [run.kept | {"weights": run.held.weights} for run in runs]) if here else None
            self._cached = _CachedRuns(self._cache_key(), runs, FixedMemory(memory), rows)
        return self._cached.runs

    def _create_runs(self) -> list[Run]:
        states = self._optimizer._states
        all_params = states.all_params()
        host = dict(zip(all_params, states.on_host(all_params), strict=True))
        found, not_stepped = [], self.not_stepped()
        for h in self._held():
            begin, end = h.begin, h.begin + h.weights.numel()
            if h.name not in not_stepped:
                kept = states.changes_of(h.param, h.local, host[h.param])
            else:
                begin, end, kept = 0, end - begin, self._unchanged(h.weights.numel())
            views = {key: kept[key][begin // n : -(-end // n)] for key, n in _PER_ITEM.items() if key in kept}
            found.append(Run(h, views, self._checksum_of(h)))
        return found

    def rows_on_host(self) -> Any:
        """Returns the runs that `current_runs` returned last as an array of tx_delta_run; None unless all of their
        memory is on the host."""
        return None if self._cached is None else self._cached.rows

    def rows(self, runs: list[Run], on_host: list[dict[str, Tensor]]) -> Any:
        """Returns runs as an array of tx_delta_run. on_host: for each run, host tensors of its weights ("weights") and
        of the steps' records about them."""
        found = []
        for run, here in zip(runs, on_host, strict=True):
            kept = [adamw_args.argument(here.get(key)) for key in ("weights", *KEYS)]
            place = self._model.order[run.held.name], run.held.offset
            found.append(delta_library.DeltaRun(*place, *kept, adamw_args.argument(run.checksums)))
        return (delta_library.DeltaRun * len(found))(*found)

    def not_stepped(self) -> set[str]:
        """Returns the names of parameters that no step changes: not in the optimizer, or frozen and without state."""
        states = self._optimizer._states
        trained = {p for p in states.all_params() if p.requires_grad or states.has_state(p)}
        return {name for name, p in self._model.params.items() if p not in trained}

    def _unchanged(self, numel: int) -> dict[str, Tensor]:
        """Returns records without a change (zeros) for at least `numel` weights. Only `renew` writes to them, zeros."""
        if not self._nothing or self._nothing["changed"].numel() * _PER_ITEM["changed"] < numel:
            self._nothing = WeightChanges(False).record_of(torch.empty(0, device="cpu"), numel, torch.device("cpu"))
        return self._nothing

    def _checksum_of(self, h: HeldWeights) -> Tensor:
        made = self._checksums.get((h.name, h.offset))
        if made is None:
            made = torch.zeros(-(-h.weights.numel() // constants.CHECKSUM), dtype=torch.int64, device="cpu")
            self._checksums[h.name, h.offset] = made
        return made


def _layout(parts: list[HeldWeights]) -> list[tuple[str, int, int]]:
    return [(h.name, h.offset, h.weights.numel()) for h in parts]
