"""`KeptChanges`, a publisher's records about this rank's weights: what steps changed, and checksums of the published
weights."""

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
    """Follows the steps of an optimizer and finds other writes to weights, so that both get published."""

    def __init__(self, optimizer: OptimizerBase, model: ModelTable, part: int, parts: int, exact: bool) -> None:
        """part: this rank's index among the `parts` ranks that train the model. exact: see `WeightPublisher`."""
        self._optimizer, self._model = optimizer, model
        self._changes = WeightChanges(exact)
        optimizer._states.changes = self._changes
        optimizer._stepper.drop_plan()
        self._runs = PublishedRuns(optimizer, model, self._changes, part, parts)
        self._compared: silent_writes.MasterComparison | None = None
        self._writes = silent_writes.WriteRecord()
        self._stage = HostStage()
        self._captured = False  # whether a step was captured into a CUDA graph: its replays cannot be counted
        self._settled: dict[int, Tensor] = {}  # by id: parameters with state, all of whose earlier writes are known
        self._steps = 0  # optimizer steps since the last version
        self._follow_steps(optimizer)

    def _follow_steps(self, optimizer: OptimizerBase) -> None:
        self._note_writes()
        self._settle()
        before, after = hook(self.before_writing), hook(self.stepped)
        for handle in (optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)):
            weakref.finalize(self, handle.remove)
        self._changes.watcher = weakref.ref(self)

    # -- weight_changes.Watcher

    def before_writing(self) -> None:
        self._optimizer.writing_calls.refuse("step()")  # this is called before the step looks for other calls
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
        if not offload_guard.is_offloaded(self._optimizer, self._model.params.values()):
            self._writes.mark(self._members())

    def weights_moved(self, params: Iterable[Tensor], offloaded: bool) -> None:
        self._writes.moved(params, offloaded)

    # -- changes by steps and by other writes

    def refuse_changed(self, doing: str) -> None:
        """Raises RuntimeError if the optimizer has a newer publisher, or the model is sharded differently now. doing:
        begins the message."""
        if self._optimizer._states.changes is not self._changes:
            raise RuntimeError(f"{doing}: a newer WeightPublisher was made for this optimizer; use that one")
        if self._runs.layout_changed():
            raise RuntimeError(
                f"{doing}: the model is sharded differently than when the WeightPublisher was made (parallelize, "
                "fully_shard?); make a new one"
            )

    def _members(self) -> list[ParamState]:
        """Returns the members of a step for all parameters with state. That includes those that the last step skipped
        (frozen or without a gradient): other code may write to their weights."""
        states, plan = self._optimizer._states, self._optimizer._stepper.current_plan()
        all_params, stepped = states.all_params(), [] if plan is None else plan.members
        if len(stepped) == len(all_params):
            return stepped
        known = {m.param for m in stepped}
        return stepped + states.members(all_params, [p not in known and states.has_state(p) for p in all_params])

    def _mark_before_first_step(self) -> None:
        """Marks blocks, of parameters without state, that were written since the last version. The first step, or a
        state_dict(), creates the master from the weight; then a comparison with the master shows no earlier writes.
        Until then the weight can only be compared with the checksums of the published weights."""
        fresh = {id(p) for p in self._fresh()}
        if not fresh:
            return
        not_stepped = self._runs.not_stepped()
        for run in self._runs.current_runs():
            if id(run.held.param) in fresh and run.held.name not in not_stepped:
                moved = run.kept["moved"]
                unknown = _differing(run).repeat_interleave(constants.CHECKSUM // constants.BLOCK)[: moved.numel()]
                moved[unknown.to(moved.device)] = torch.inf
        self._settle()

    def _fresh(self) -> list[Tensor]:
        """Returns the parameters that are stepped and are not in `_settled`."""
        states = self._optimizer._states
        left = [p for p in states.all_params() if id(p) not in self._settled]
        return [p for p in left if p.requires_grad or states.has_state(p)]

    def _settle(self) -> None:
        """Notes that all writes so far are known for every parameter that has state now."""
        self._settled |= {id(p): p for p in self._fresh() if self._optimizer._states.has_state(p)}

    def _note_writes(self) -> None:
        self._writes.note(self._members(), self._optimizer.on_external_write == "ignore")

    @contextmanager
    def silent_writes_marked(self) -> Iterator[None]:
        """Marks weights that were written outside of steps (see `silent_writes`), so that a version encoded inside
        contains them. At the exit they count as published."""
        members = self._members()
        self._writes.mark(members)
        if self._compared is None or not self._compared.fits(members):
            self._compared = silent_writes.MasterComparison(members)
        written = self._compared.mark()
        yield
        silent_writes.MasterComparison(written).mark()  # for the next version; no other weight was written inside
        self._note_writes()
        self._settle()
        self._steps = 0

    @property
    def is_one_step(self) -> bool:
        """Whether exactly one step was taken since the last version. False if a step was captured into a CUDA graph,
        because replays cannot be counted."""
        return self._steps == 1 and not self._captured

    # -- for the C library

    @contextmanager
    def on_host(self) -> Iterator[Any]:
        """Yields the runs as an array of tx_delta_run in host memory. What the C library writes to the records is
        copied back to the device at the exit, unless an error was raised."""
        runs = self._runs.current_runs()
        if (rows := self._runs.rows_on_host()) is not None:
            yield rows
            return
        kept = [t for run in runs for t in run.kept.values()]
        copies = self._stage.to_host([*kept, *(run.held.weights for run in runs)])
        left = iter(copies)
        named = [{key: next(left) for key in run.kept} for run in runs]
        yield self._runs.rows(runs, [copy | {"weights": next(left)} for copy in named])
        self._stage.take_back(kept, copies[: len(kept)])

    def renew(self) -> None:
        """Makes the current weights the published ones: resets the records and renews the checksums."""
        with self.on_host() as runs:
            delta_library.call("renew", len(runs), runs, threads())

    # -- positions and values

    def patches(self) -> list[WeightPatch]:
        """Returns what changed since the last version: at least one patch per parameter, in the model's order."""
        found: dict[str, list[WeightPatch]] = {}
        for run in self._runs.current_runs():
            found.setdefault(run.held.name, []).append(_patch(run))
        return [patch for name, p in self._model.params.items() for patch in found.get(name) or [_nothing(name, p)]]


def _nothing(name: str, p: Tensor) -> WeightPatch:
    none = torch.empty(0, dtype=index_dtype(p.numel()), device=p.device)
    return WeightPatch(name, none, torch.empty(0, dtype=p.dtype, device=p.device), tuple(p.shape))


def _patch(run: Run) -> WeightPatch:
    """Returns a patch with every weight that a step changed, and with all weights of blocks that other code may have
    written to: those with an infinite `moved` or a different checksum."""
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
    """Returns, for each checksum block, whether its weights differ from the published ones."""
    now, weights = torch.zeros_like(run.checksums), run.held.weights.cpu()
    none = adamw_args.argument(None)
    row = delta_library.DeltaRun(0, 0, adamw_args.argument(weights), none, none, none, adamw_args.argument(now))
    delta_library.call("renew", 1, row, threads())
    return now != run.checksums
