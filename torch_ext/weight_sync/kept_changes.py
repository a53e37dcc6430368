"""What a publisher keeps of the weights of this rank: what steps say of them, and checksums of what was published."""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from torch_ext.grads.backward_end import hook
from torch_ext.native import adamw_args, constants, graph_capture
from torch_ext.optim.cpu_offload.staged_args import threads
from torch_ext.optim.optimizer_base import OptimizerBase
from torch_ext.optim.state.param_state import ParamState
from torch_ext.optim.state.weight_changes import WeightChanges
from torch_ext.tensors import offload_guard
from torch_ext.weight_sync import delta_library, silent_writes
from torch_ext.weight_sync.host_stage import HostStage
from torch_ext.weight_sync.model_table import ModelTable
from torch_ext.weight_sync.published_runs import PublishedRuns, Run
from torch_ext.weight_sync.weight_patch import WeightPatch, index_dtype


class KeptChanges:
    def __init__(self, optimizer: OptimizerBase, model: ModelTable, part: int, parts: int, exact: bool) -> None:
        """part, parts: this rank among those of the model."""
        self._optimizer, self._model = optimizer, model
        self._changes = WeightChanges(exact)
        optimizer._states.changes = self._changes
        optimizer._stepper.drop_plan()
        self._runs = PublishedRuns(optimizer, model, self._changes, part, parts)
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
        before, after = hook(self.before_writing), hook(self.stepped)
        for handle in (optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)):
            weakref.finalize(self, handle.remove)
        self._changes.watcher = weakref.ref(self)

    # -- see weight_changes.Watcher

    def before_writing(self) -> None:
        self._writes.mark(self._members())
        self._mark_before_first_step()

    def after_writing(self) -> None:
        self._note_writes()
        self._settle()

    def stepped(self) -> None:
        self._note_writes()
        self._settle()
        self._steps += 1
        self._captured |= graph_capture.is_capturing(self._model.device)

    def weights_move(self) -> None:
        if not offload_guard.is_away(self._optimizer, self._model.params.values()):
            self._writes.mark(self._members())

    def weights_moved(self, params: Iterable[Tensor], away: bool) -> None:
        self._writes.moved(params, away)

    # -- what steps and others did

    def refuse_changed(self, doing: str) -> None:
        """RuntimeError where steps tell somebody else, or this rank has other parts than when this was made."""
        if self._optimizer._states.changes is not self._changes:
            raise RuntimeError(f"{doing}: another WeightPublisher was made of this optimizer; use that one")
        if self._runs.cut_anew():
            raise RuntimeError(
                f"{doing}: the model is cut otherwise than when the WeightPublisher was made (parallelize, "
                "fully_shard?); make a new one"
            )

    def _members(self) -> list[ParamState]:
        """Of the parameters that have state: also of those that the last step left alone, frozen or without a gradient,
        whose weights may be written meanwhile."""
        states, plan = self._optimizer._states, self._optimizer._stepper.standing_plan()
        everyone, stepped = states.everyone(), [] if plan is None else plan.members
        if len(stepped) == len(everyone):
            return stepped
        known = {m.param for m in stepped}
        return stepped + states.members(everyone, [p not in known and states.is_made(p) for p in everyone])

    def _mark_before_first_step(self) -> None:
        """Whoever makes a weight's state, the first step or a state_dict(), makes its master of it, so that nothing
        tells of writes before that. Until then it can be compared with what was published only."""
        fresh = {id(p) for p in self._fresh()}
        if not fresh:
            return
        unchanging = self._runs.unchanging()
        for run in self._runs.now():
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
        runs = self._runs.now()
        if (rows := self._runs.rows_on_host()) is not None:
            yield rows
            return
        kept = [t for run in runs for t in run.kept.values()]
        copies = self._stage.bring([*kept, *(run.held.weights for run in runs)])
        left = iter(copies)
        named = [{key: next(left) for key in run.kept} for run in runs]
        yield self._runs.rows(runs, [copy | {"weights": next(left)} for copy in named])
        self._stage.take_back(kept, copies[: len(kept)])

    def renew(self) -> None:
        """The weights as they are were published."""
        with self.on_host() as runs:
            delta_library.call("renew", len(runs), runs, threads())

    # -- as positions and values

    def patches(self) -> list[WeightPatch]:
        found: dict[str, list[WeightPatch]] = {}
        for run in self._runs.now():
            found.setdefault(run.held.name, []).append(_patch(run))
        return [patch for name, p in self._model.params.items() for patch in found.get(name) or [_nothing(name, p)]]


def _nothing(name: str, p: Tensor) -> WeightPatch:
    none = torch.empty(0, dtype=index_dtype(p.numel()), device=p.device)
    return WeightPatch(name, none, torch.empty(0, dtype=p.dtype, device=p.device), tuple(p.shape))


def _patch(run: Run) -> WeightPatch:
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


def _differing(run: Run) -> Tensor:
    """Of each block of a checksum, whether its weights are others than those that were published."""
    now, weights = torch.zeros_like(run.checksums), run.held.weights.cpu()
    none = adamw_args.argument(None)
    row = delta_library.DeltaRun(0, 0, adamw_args.argument(weights), none, none, none, adamw_args.argument(now))
    delta_library.call("renew", 1, row, threads())
    return now != run.checksums
