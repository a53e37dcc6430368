"""The runs of weights that a rank publishes, prepared once and kept while everything is where it was."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_ext.native import adamw_args, constants
from torch_ext.optim.optimizer_base import OptimizerBase
from torch_ext.optim.state.weight_changes import KEYS, WeightChanges
from torch_ext.optim.state.write_check import FixedMemory
from torch_ext.params.shard_map import ShardMap
from torch_ext.weight_sync import delta_library
from torch_ext.weight_sync.held_weights import HeldWeights, held
from torch_ext.weight_sync.model_table import ModelTable

_PER_ITEM = {"changed": 8, "moved": constants.BLOCK, "distance": 2}  # weights per element

_SHORT = 1 << 20
"""Weights of a run that no step changes: the zeros beside it are as many as its bits and bounds."""


class Run(NamedTuple):
    held: HeldWeights
    kept: dict[str, Tensor]
    """The part of what steps say that is of these weights: views."""
    checksums: Tensor
    """Of the weights as they were published, on the host."""


class _Standing(NamedTuple):
    """Valid as long as everything is where it was."""

    seen: object
    """What `_seen` was."""
    runs: list[Run]
    memory: FixedMemory
    """Theirs: what is offloaded comes back to other addresses."""
    rows: Any
    """The runs as an array of tx_delta_run, where all of their memory is the host's."""


class PublishedRuns:
    def __init__(
        self, optimizer: OptimizerBase, model: ModelTable, changes: WeightChanges, part: int, parts: int
    ) -> None:
        """part, parts: this rank among those of the model."""
        self._optimizer, self._model, self._changes = optimizer, model, changes
        self._part, self._parts = part, parts
        self._nothing: dict[str, Tensor] = {}  # what steps say of weights that none changes: zeros, for all of them
        self._untrained = self.unchanging()
        self._checksums: dict[tuple[str, int], Tensor] = {}
        self._layout = _layout(self._held())
        self._standing: _Standing | None = None
        self._shards: ShardMap | None = None  # of the model's parameters

    def cut_anew(self) -> bool:
        """Whether this rank has other parts than when this was made."""
        return not self._stands() and _layout(self._held()) != self._layout

    def _seen(self) -> object:
        """Equal as long as parameters, what steps say of them, and which are stepped, stay as they are and where."""
        states, params = self._optimizer._states, list(self._model.params.values())
        if self._shards is None or not self._shards.fits(params):
            self._shards = ShardMap(params)
        everyone = states.everyone()
        trained = [p.requires_grad or states.is_made(p) for p in everyone]
        where = self._shards.memory()
        return self._shards, where, list(map(id, everyone)), trained, states.on_host(everyone), self._changes.made

    def _held(self) -> list[HeldWeights]:
        """In the order of the table. What nobody trains, or did not when this was made, is in short runs."""
        found = []
        for h in held(self._model.params, self._part, self._parts):
            found += h.cut(_SHORT) if h.name in self._untrained else [h]
        return sorted(found, key=lambda h: (self._model.order[h.name], h.offset))

    def _stands(self) -> bool:
        known = self._standing
        return known is not None and self._seen() == known.seen and known.memory.holds()

    def now(self) -> list[Run]:
        if self._standing is None or not self._stands():
            runs = self._made_runs()
            memory = [t for run in runs for t in (run.held.weights, *run.kept.values())]
            here = all(t.is_cpu for t in memory)
            rows = self.rows(runs, [run.kept | {"weights": run.held.weights} for run in runs]) if here else None
            self._standing = _Standing(self._seen(), runs, FixedMemory(memory), rows)
        return self._standing.runs

    def _made_runs(self) -> list[Run]:
        states = self._optimizer._states
        everyone = states.everyone()
        host = dict(zip(everyone, states.on_host(everyone), strict=True))
        found, unchanging = [], self.unchanging()
        for h in self._held():
            begin, end = h.begin, h.begin + h.weights.numel()
            if h.name not in unchanging:
                kept = states.changes_of(h.param, h.local, host[h.param])
            else:
                begin, end, kept = 0, end - begin, self._unchanged(h.weights.numel())
            views = {key: kept[key][begin // n : -(-end // n)] for key, n in _PER_ITEM.items() if key in kept}
            found.append(Run(h, views, self._checksum_of(h)))
        return found

    def rows_on_host(self) -> Any:
        """The runs that `now` returned last as an array of tx_delta_run; None where not all of their memory is the
        host's."""
        return None if self._standing is None else self._standing.rows

    def rows(self, runs: list[Run], on_host: list[dict[str, Tensor]]) -> Any:
        """Runs as such an array. on_host: the weights of each, and what is kept of them, there."""
        found = []
        for run, here in zip(runs, on_host, strict=True):
            kept = [adamw_args.argument(here.get(key)) for key in ("weights", *KEYS)]
            place = self._model.order[run.held.name], run.held.offset
            found.append(delta_library.DeltaRun(*place, *kept, adamw_args.argument(run.checksums)))
        return (delta_library.DeltaRun * len(found))(*found)

    def unchanging(self) -> set[str]:
        """Parameters of which steps have nothing to say: not the optimizer's, or frozen and without state."""
        states = self._optimizer._states
        trained = {p for p in states.everyone() if p.requires_grad or states.is_made(p)}
        return {name for name, p in self._model.params.items() if p not in trained}

    def _unchanged(self, numel: int) -> dict[str, Tensor]:
        """Of so many weights, or more. Nobody but renew writes to it, zeros."""
        if not self._nothing or self._nothing["changed"].numel() * _PER_ITEM["changed"] < numel:
            self._nothing = WeightChanges(False).beside(torch.empty(0, device="cpu"), numel, torch.device("cpu"))
        return self._nothing

    def _checksum_of(self, h: HeldWeights) -> Tensor:
        made = self._checksums.get((h.name, h.offset))
        if made is None:
            made = torch.zeros(-(-h.weights.numel() // constants.CHECKSUM), dtype=torch.int64, device="cpu")
            self._checksums[h.name, h.offset] = made
        return made


def _layout(parts: list[HeldWeights]) -> list[tuple[str, int, int]]:
    return [(h.name, h.offset, h.weights.numel()) for h in parts]
