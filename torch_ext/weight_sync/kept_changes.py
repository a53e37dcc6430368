"""What a publisher keeps of the weights of this rank: what steps say of them, and checksums of what was published."""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_ext.grads.backward_end import hook
from torch_ext.native import adamw_args, constants, graph_capture
from torch_ext.optim.cpu_offload.staged_args import threads
from torch_ext.optim.optimizer_base import OptimizerBase
from torch_ext.optim.state.param_state import ParamState
from torch_ext.optim.state.weight_changes import KEYS, WeightChanges
from torch_ext.optim.state.write_check import FixedMemory
from torch_ext.params.shard_map import ShardMap
from torch_ext.tensors import offload_guard
from torch_ext.weight_sync import delta_library, silent_writes
from torch_ext.weight_sync.held_weights import HeldWeights, held
from torch_ext.weight_sync.host_stage import HostStage
from torch_ext.weight_sync.model_table import ModelTable
from torch_ext.weight_sync.weight_patch import WeightPatch, index_dtype

_PER_ITEM = {"changed": 8, "moved": constants.BLOCK, "distance": 2}  # weights per element

_SHORT = 1 << 20
"""Weights of a run that no step changes: the zeros beside it are as many as its bits and bounds."""


class _Run(NamedTuple):
    held: HeldWeights
    kept: dict[str, Tensor]
    """The part of what steps say that is of these weights: views."""
    checksums: Tensor
    """Of the weights as they were published, on the host."""


class _Standing(NamedTuple):
    """Valid as long as everything is where it was."""

    seen: object
    """What `_seen` was."""
    runs: list[_Run]
    memory: FixedMemory
    """Theirs: what is offloaded comes back to other addresses."""
    rows: Any
    """The runs as an array of tx_delta_run, where all of their memory is the host's."""


class KeptChanges:
    def __init__(self, optimizer: OptimizerBase, model: ModelTable, part: int, parts: int, exact: bool) -> None:
        """part, parts: this rank among those of the model."""
        self._optimizer, self._model = optimizer, model
        self._part, self._parts = part, parts
        self._changes = WeightChanges(exact)
        self._nothing: dict[str, Tensor] = {}  # what steps say of weights that none changes: zeros, for all of them
        self._untrained = self._unchanging()
        self._checksums: dict[tuple[str, int], Tensor] = {}
        optimizer._states.changes = self._changes
        optimizer._stepper.drop_plan()
        self._layout = _layout(self._held())
        self._standing: _Standing | None = None
        self._shards: ShardMap | None = None  # of the model's parameters
        self._compared: silent_writes.Compared | None = None
        self._writes = silent_writes.WriteRecord()
        self._stage = HostStage()
        self._captured = False  # whether a step was, into a CUDA graph: replays tell nobody how many there were
        self._settled: dict[int, Tensor] = {}  # by id, parameters that had state when all writes were known
        self._steps = 0  # of the optimizer, since the last version
        self._follow_steps(optimizer)

    def _follow_steps(self, optimizer: OptimizerBase) -> None:
        self._note_writes()
        self._settle()
        before, after = hook(self.before_stepping), hook(self._stepped_once)
        for handle in (optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)):
            weakref.finalize(self, handle.remove)
        self._changes.watcher = weakref.ref(self)

    # -- see weight_changes.Watcher

    def before_stepping(self) -> None:
        self._writes.mark(self._members())
        self._mark_before_first_step()

    def after_backward(self) -> None:
        self._note_writes()
        self._settle()

    def weights_move(self) -> None:
        if not offload_guard.is_away(self._optimizer, self._model.params.values()):
            self._writes.mark(self._members())

    def weights_moved(self, params: Iterable[Tensor], away: bool) -> None:
        self._writes.moved(params, away)

    # -- what steps and others did

    def _stepped_once(self) -> None:
        self._note_writes()
        self._settle()
        self._steps += 1
        self._captured |= graph_capture.is_capturing(self._model.device)

    def refuse_changed(self, doing: str) -> None:
        """RuntimeError where steps tell somebody else, or this rank has other parts than when this was made."""
        if self._optimizer._states.changes is not self._changes:
            raise RuntimeError(f"{doing}: another WeightPublisher was made of this optimizer; use that one")
        if not self._stands() and _layout(self._held()) != self._layout:
            raise RuntimeError(
                f"{doing}: the model is cut otherwise than when the WeightPublisher was made (parallelize, "
                "fully_shard?); make a new one"
            )

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

    def _members(self) -> list[ParamState]:
        """Of the parameters that have state."""
        plan = self._optimizer._stepper.standing_plan()
        if plan is not None:
            return plan.members
        states = self._optimizer._states
        everyone = states.everyone()
        return states.members(everyone, [states.is_made(p) for p in everyone])

    def _stands(self) -> bool:
        known = self._standing
        return known is not None and self._seen() == known.seen and known.memory.holds()

    def _runs(self) -> list[_Run]:
        if self._standing is None or not self._stands():
            runs = self._made_runs()
            memory = [t for run in runs for t in (run.held.weights, *run.kept.values())]
            here = all(t.is_cpu for t in memory)
            rows = _array([self._row(run, run.kept | {"weights": run.held.weights}) for run in runs]) if here else None
            self._standing = _Standing(self._seen(), runs, FixedMemory(memory), rows)
        return self._standing.runs

    def _made_runs(self) -> list[_Run]:
        states = self._optimizer._states
        everyone = states.everyone()
        host = dict(zip(everyone, states.on_host(everyone), strict=True))
        found, unchanging = [], self._unchanging()
        for h in self._held():
            begin, end = h.begin, h.begin + h.weights.numel()
            if h.name not in unchanging:
                kept = states.changes_of(h.param, h.local, host[h.param])
            else:
                begin, end, kept = 0, end - begin, self._unchanged(h.weights.numel())
            views = {key: kept[key][begin // n : -(-end // n)] for key, n in _PER_ITEM.items() if key in kept}
            found.append(_Run(h, views, self._checksum_of(h)))
        return found

    def _unchanging(self) -> set[str]:
        """Parameters of which steps have nothing to say: not the optimizer's, or frozen and without state."""
        states = self._optimizer._states
        trained = {p for p in states.everyone() if p.requires_grad or states.is_made(p)}
        return {name for name, p in self._model.params.items() if p not in trained}

    def _unchanged(self, numel: int) -> dict[str, Tensor]:
        """Of so many weights, or more. Nobody but renew writes to it, zeros."""
        if not self._nothing or self._nothing["changed"].numel() * _PER_ITEM["changed"] < numel:
            self._nothing = WeightChanges(False).beside(torch.empty(0), numel, torch.device("cpu"))
        return self._nothing

    def _checksum_of(self, h: HeldWeights) -> Tensor:
        made = self._checksums.get((h.name, h.offset))
        if made is None:
            made = torch.zeros(-(-h.weights.numel() // constants.CHECKSUM), dtype=torch.int64)
            self._checksums[h.name, h.offset] = made
        return made

    def _mark_before_first_step(self) -> None:
        """Whoever makes a weight's state, the first step or a state_dict(), makes its master of it, so that nothing
        tells of writes before that. Until then it can be compared with what was published only."""
        fresh = {id(p) for p in self._fresh()}
        if not fresh:
            return
        unchanging = self._unchanging()
        for run in self._runs():
            if id(run.held.param) in fresh and run.held.name not in unchanging:
                moved = run.kept["moved"]
                unknown = _differing(run).repeat_interleave(constants.CHECKSUM // constants.BLOCK)[: moved.numel()]
                moved[unknown.to(moved.device)] = torch.inf
        self._settle()

    def _fresh(self) -> list[Tensor]:
        states = self._optimizer._states
        left = [p for p in states.everyone() if id(p) not in self._settled]
        return [p for p in left if p.requires_grad or states.is_made(p)]

    def _settle(self) -> None:
        """All that was written so far to parameters that have state is known."""
        self._settled |= {id(p): p for p in self._fresh() if self._optimizer._states.is_made(p)}

    def _note_writes(self) -> None:
        self._writes.note(self._members(), self._optimizer.on_external_write == "ignore")

    @contextmanager
    def silent_writes_marked(self) -> Iterator[None]:
        """Inside, they travel; see `silent_writes`."""
        members = self._members()
        self._writes.mark(members)
        if self._compared is None or not self._compared.are(members):
            self._compared = silent_writes.Compared(members)
        written = self._compared.mark()
        yield
        silent_writes.Compared(written).mark()  # nobody wrote to them meanwhile
        self._note_writes()
        self._settle()
        self._steps = 0

    @property
    def is_one_step(self) -> bool:
        """Whether no more than one was taken since the last version, as far as anybody can know."""
        return self._steps == 1 and not self._captured

    # -- for the library

    @contextmanager
    def on_host(self) -> Iterator[Any]:
        """An array of tx_delta_run, which may be written to: what it says is taken over, where the library did not
        refuse it."""
        runs = self._runs()
        if self._standing is not None and self._standing.rows is not None:
            yield self._standing.rows
            return
        kept = [t for run in runs for t in run.kept.values()]
        copies = self._stage.bring([*kept, *(run.held.weights for run in runs)])
        left = iter(copies)
        named = [{key: next(left) for key in run.kept} for run in runs]
        rows = [self._row(run, copy | {"weights": next(left)}) for run, copy in zip(runs, named, strict=True)]
        yield _array(rows)
        self._stage.take_back(kept, copies[: len(kept)])

    def _row(self, run: _Run, on_host: dict[str, Tensor]) -> delta_library.DeltaRun:
        kept = [adamw_args.argument(on_host.get(key)) for key in ("weights", *KEYS)]
        return delta_library.DeltaRun(
            self._model.order[run.held.name], run.held.offset, *kept, adamw_args.argument(run.checksums)
        )

    def renew(self) -> None:
        """The weights as they are were published."""
        with self.on_host() as runs:
            delta_library.call("renew", len(runs), runs, threads())

    # -- as positions and values

    def patches(self) -> list[WeightPatch]:
        found: dict[str, list[WeightPatch]] = {}
        for run in self._runs():
            found.setdefault(run.held.name, []).append(_patch(run))
        return [patch for name, p in self._model.params.items() for patch in found.get(name) or [_nothing(name, p)]]


def _layout(parts: list[HeldWeights]) -> list[tuple[str, int, int]]:
    return [(h.name, h.offset, h.weights.numel()) for h in parts]


def _array(rows: list[delta_library.DeltaRun]) -> Any:
    return (delta_library.DeltaRun * len(rows))(*rows)


def _nothing(name: str, p: Tensor) -> WeightPatch:
    none = torch.empty(0, dtype=index_dtype(p.numel()), device=p.device)
    return WeightPatch(name, none, torch.empty(0, dtype=p.dtype, device=p.device), tuple(p.shape))


def _patch(run: _Run) -> WeightPatch:
    """Every weight with a bit that changed, and whole blocks of which nobody knows."""
    h, (numel, device) = run.held, (run.held.weights.numel(), run.held.weights.device)
    bits = torch.arange(8, dtype=torch.uint8, device=device)
    changed = (run.kept["changed"].to(device)[:, None] >> bits & 1).view(-1)[:numel].bool()
    unknown = run.kept["moved"].to(device).isfinite().logical_not()
    changed |= unknown.repeat_interleave(constants.BLOCK)[:numel]
    changed |= _differing(run).to(device).repeat_interleave(constants.CHECKSUM)[:numel]
    at = changed.nonzero().view(-1)
    p = h.param
    return WeightPatch(h.name, (at + h.offset).to(index_dtype(p.numel())), h.weights[at], tuple(p.shape))


def _differing(run: _Run) -> Tensor:
    """Of each block of a checksum, whether its weights are others than those that were published."""
    now, weights = torch.zeros_like(run.checksums), run.held.weights.cpu()
    none = adamw_args.argument(None)
    row = delta_library.DeltaRun(0, 0, adamw_args.argument(weights), none, none, none, adamw_args.argument(now))
    delta_library.call("renew", 1, row, threads())
    return now != run.checksums
