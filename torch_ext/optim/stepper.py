"""The step of an optimizer: in step(), in backward, on the device and on the host."""

from collections.abc import Callable
from itertools import compress
from typing import cast

import torch
from torch import Tensor

from torch_ext.comm import group_calls
from torch_ext.native import graph_capture, warning
from torch_ext.optim.current_hyper import CurrentHyper
from torch_ext.optim.grad_scaling import GradScaling, Scalars
from torch_ext.optim.optimizer_states import OptimizerStates, Settings
from torch_ext.optim.released_step import ReleasedStep
from torch_ext.optim.repeated_step import RepeatedStep
from torch_ext.optim.state import masters
from torch_ext.optim.state.param_state import gather_of
from torch_ext.optim.step_in_backward import StepInBackward
from torch_ext.optim.step_plan import StepPlan
from torch_ext.optim.step_progress import StepProgress
from torch_ext.optim.step_run import ArgumentsRefused, StepRun, check_signals
from torch_ext.optim.unfinished_step import UnfinishedStep
from torch_ext.params import reducer_registry
from torch_ext.params.param_groups import HyperparameterTable
from torch_ext.params.shard_map import ShardMap


class Stepper:
    """Steps an optimizer's parameters, in step() and in backward, and keeps the plan of the last step. Implements
    `reducer_registry.BucketStepper`."""

    def __init__(self, states: OptimizerStates, scaling: GradScaling, in_backward: StepInBackward) -> None:
        self._states, self._scaling, self._in_backward = states, scaling, in_backward
        self.plan: StepPlan | None = None
        self._hyper = CurrentHyper()
        self._warned = False
        self.unfinished = UnfinishedStep()
        self._repeated = RepeatedStep(states, scaling, in_backward, self._hyper)

    def step(self, released: bool = False) -> None:
        """Steps the parameters that have a gradient. released: others were stepped in backward, and their gradients
        freed. RuntimeError, before anything is written, where the operator rejects a gradient or a parameter."""
        if self._repeated.run():
            return
        states, scaling = self._states, self._scaling
        all_params = states.all_params()
        shards = states.current_shards(all_params)
        grads, missing = shards.counted_grads()
        scaling.refuse_local_scaler(shards)
        active = [True] * len(grads) if missing == 0 else [g is not None for g in grads]
        present = cast(list[Tensor], grads if missing == 0 else list(compress(grads, active)))
        if not present:
            if released:
                self._end_measurement()
            elif not self._warned:
                self._warned = True
                _warn_of_orphans(len(all_params))
            return
        _refuse_capture(states, all_params)
        self.unfinished.refuse("step()")
        hyper = self.current_hyper(keeps=False)
        clipping = scaling.current_clipping(shards, present, active)
        if self._in_backward:
            fits = self.plan is not None and self.plan.fits(shards, active, states.state)
            self._in_backward.refuse_different_step(fits, clipping is not None or scaling.unscales())
        plan = self._run(shards, active, present, hyper, scaling.scalars(clipping))
        if plan is not None:
            self._end_measurement()
            scaling.end_step(clipping, plan.members, present)
            self._repeated.follow(shards, self.plan)

    def end_partial_step(self) -> None:
        """Ends a step that step() did not complete: it raised midway, or zero_grad() has kept what backward stepped."""
        self._end_measurement()
        if (watcher := self._states.watcher) is not None:
            watcher.stepped()

    def _end_measurement(self) -> None:
        """Ends the measurement, if the plan that was run has measured its step (`measure_health`)."""
        measuring = self._states.measuring
        if self.plan is not None and measuring.next is not None:
            measuring.end([m.state["step"] for m in self.plan.members])
            self.drop_plan()  # its arguments would make the next step measure, too

    def _run(
        self, shards: ShardMap, active: list[bool], grads: list[Tensor], hyper: HyperparameterTable, scalars: Scalars
    ) -> StepPlan | None:
        """Runs the last step's plan or, if that does not fit, a new one. Returns it; None for an inert step."""
        states = self._states
        plan = self.plan
        if plan is None or not plan.fits(shards, active, states.state):
            plan = self._make_plan(shards, active, grads)
        if plan is not None and plan.matrices is not None:
            plan.matrices.check_gradients(plan.of_matrices(grads), scalars[2])
        rebuilt = False
        with StepProgress(shards.listeners(), self.unfinished) as progress:
            while plan is not None:
                run = StepRun(plan, grads, hyper, scalars, states.counts, states.optimizer.on_external_write, progress)
                try:
                    run.run(self._in_backward, lay_out=rebuilt)
                    break
                except BaseException as failure:
                    _note_failure(self, progress, failure)
                    if not isinstance(failure, ArgumentsRefused):
                        raise
                    # Retry once: maybe only the address or the memory order of parameters or gradients has changed.
                    if rebuilt:
                        raise RuntimeError(str(failure)) from None
                    if not plan.note_moved():
                        plan, rebuilt = self._make_plan(shards, active, grads), True
        return plan

    def current_hyper(self, keeps: bool = True) -> HyperparameterTable:
        """Returns the groups' hyper-parameters as the operator takes them. keeps: see `CurrentHyper.table`."""
        return self._hyper.table(self._states.optimizer.adamw_groups, self._states.counts.device, keeps)

    # -- the plan

    def _make_plan(self, shards: ShardMap, active: list[bool], grads: list[Tensor]) -> StepPlan | None:
        """Returns a new plan, and creates missing state. None for an inert step, which creates state only.

        torch.distributed.checkpoint calls step() with lr 0 and zero gradients so that state is created. That must not
        be a step: with a counter at 1 the first real update would be 1.34 times too small."""
        states = self._states
        first = not states.has_any_state() and all(float(g["lr"]) == 0 for g in states.groups)
        if first and _all_zero(shards, active, grads):
            self.drop_plan()
            states.drop_removed(shards.params)
            states.members(shards.params, active)
            states.synced.clear()  # so that the first step notices whatever is written before it
            return None
        return self._build_plan(shards, active, grads)

    def _build_plan(self, shards: ShardMap, active: list[bool], grads: list[Tensor]) -> StepPlan:
        states = self._states
        self.drop_plan()
        states.drop_removed(shards.params)
        members = states.members(shards.params, active)
        states.compare_ranks(members)
        owners = [owner for owner, there in zip(shards.owners, active, strict=True) if there]
        gathers = [gather_of(member, owner) for member, owner in zip(members, owners, strict=True)]
        host = states.host.plan(members, gathers, states.optimizer.averaging)
        known = (states.state, states.synced, states.optimizer)
        self.plan = StepPlan(shards, active, members, grads, gathers, host, *known)
        for owner in set(owners):
            if owner is not None:
                owner.register_stepper(self)
        return self.plan

    def drop_plan(self) -> None:
        """Drops the plan, so that the next step makes a new one. Its record of masters in sync is kept."""
        if self.plan is not None:
            self._states.synced.update(self.plan.writes.synced())
            self.plan = None
            self._repeated.follow(None, None)

    def current_plan(self) -> StepPlan | None:
        """Returns the last step's plan if parameters, states and their memory are still the same, else None."""
        shards, plan = self._states.current_shards(self._states.all_params()), self.plan
        fits = plan is not None and plan.fits(shards, plan.active, self._states.state) and plan.same_forms()
        return plan if fits else None

    # -- in backward

    def begin_release(self, before: ReleasedStep | None) -> ReleasedStep:
        """Prepares a backward that steps all trained parameters, with the groups' current hyper-parameters. before: the
        ReleasedStep of the last such backward, which is reused if its plan still fits."""
        states, plan = self._states, self.plan
        all_params = states.all_params()
        shards, active = states.current_shards(all_params), [p.requires_grad for p in all_params]
        _refuse_capture(states, all_params)
        if states.watcher is not None:
            states.watcher.before_writing()
        if plan is None or not plan.fits(shards, active, states.state) or not plan.same_forms():
            plan = self._build_plan(shards, active, [p for p in all_params if p.requires_grad])
        mode = states.optimizer.on_external_write
        self._check_writes(plan, mode)
        step = before if before is not None and before.plan is plan else ReleasedStep(plan)
        step.begin(self.current_hyper(), states.counts[1], masters.EXTERNAL_MODES[mode])
        return step

    def _check_writes(self, plan: StepPlan, mode: str) -> None:
        with torch.no_grad():
            plan.note_moved()
            check_signals(plan, self._states.counts, mode)
            if mode == "error":
                masters.refuse_modified([m for m in plan.device.members if m.kinds.master])

    # -- see reducer_registry.BucketStepper

    def begin_stepping(self, owner: reducer_registry.GradientReducer) -> Callable[[int], None] | None:
        """Returns a function that steps a reduced bucket, with hyper-parameters read now. step() starts all-gathers."""
        states = self._states
        optimizer = states.optimizer
        _refuse_settings(optimizer)
        plan = self.current_plan()
        if plan is None or not all(plan.active):
            return None
        plan.refuse_matrices(
            "step_in_backward=True steps bucket by bucket, but Muon needs the whole gradient of a matrix: leave out "
            "step_in_backward"
        )
        _refuse_capture(states, states.all_params())
        external = masters.EXTERNAL_MODES[optimizer.on_external_write]
        self._check_writes(plan, optimizer.on_external_write)
        return self._in_backward.begin(owner, plan, self.current_hyper(), states.counts[1], external)

    def refuse_backward(self) -> None:
        self._in_backward.refuse_second_backward()

    def stepped_in_backward(self) -> bool:
        return bool(self._in_backward)

    def drop_gradients(self) -> None:
        """Drops gradients, for zero_grad(). What backward has stepped stays stepped, on every rank."""
        self._scaling.forget()
        all_params = self._states.all_params()
        owners = list(reducer_registry.owners_of(all_params))
        for owner in owners:
            owner.finish_failed_backward()  # afterwards it is known what a backward that raised has stepped
        if self._in_backward and any(owner.failed for owner in owners):
            self._in_backward.clear()
        elif self._in_backward and self.plan is not None:
            self._in_backward.end(self.plan)
            self.end_partial_step()
        for owner in owners:
            owner.zero_grad(all_params)


def _note_failure(stepper: Stepper, progress: StepProgress, failure: BaseException) -> None:
    """If a step that raised has written: records that, and tells the weight publisher and the measurement that a step
    was made."""
    if progress.wrote:
        stepper.unfinished.note(stepper.plan, progress, failure)
        stepper.end_partial_step()


def _refuse_settings(optimizer: Settings) -> None:
    """Raises RuntimeError for settings that contradict the step_in_backward of a parallelized model."""
    if optimizer.skip_nonfinite:
        raise RuntimeError(
            "step_in_backward=True steps before skip_nonfinite=True can check all gradients: leave out one of them"
        )
    if optimizer.policy.clip_grad:
        raise RuntimeError(
            f"step_in_backward=True steps before the norm is known, and the optimizer's policy has "
            f"clip_grad={optimizer.policy.clip_grad}: leave out one of them"
        )


def _warn_of_orphans(params: int) -> None:
    """Warns that no parameter has a gradient. A module that loads with assign=True, or is rebuilt, has new parameters;
    the optimizer still has the old ones."""
    warning.warn(
        f"step() found no gradient for any of {params} parameters, so nothing was stepped. If the model's "
        "parameters were replaced after this optimizer was made (load_state_dict(assign=True), to_empty(), a copy of "
        "the model), make it from the new ones"
    )


def _refuse_capture(states: OptimizerStates, all_params: list[Tensor]) -> None:
    """While a CUDA graph is captured, raises RuntimeError for what cannot be captured."""
    if graph_capture.is_capturing(states.counts.device):
        graph_capture.refuse(
            states.groups,
            states.counts.device,
            on_external_write=states.optimizer.on_external_write,
            matrices=any(form is not None for group in states.groups for form in group.get("matrices") or ()),
            stateless=not states.has_any_state(),
            offloaded=any(states.on_host(all_params)),
            measures=states.measuring.next is not None,
            grad_scale=vars(states.optimizer).get("grad_scale"),
        )


def _all_zero(shards: ShardMap, active: list[bool], grads: list[Tensor]) -> bool:
    """Whether all gradients are zero, on every rank that holds a part of one. Collective where they are sharded."""
    something = torch.zeros(1, device="cpu")
    if any(bool(g.any()) for g in grads):
        something.fill_(1)
    something = something.to(grads[0].device)
    for group in dict.fromkeys(group for part in shards.parts(active) for group in part.groups):
        op = torch.distributed.ReduceOp.MAX
        group_calls.all_reduce(something, group, "step(): whether there are gradients on other ranks", op)
    return not bool(something)
