"""The step: one adamw_flat_ call for each chunk of the parameters, in backward, in step() or on the host."""

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from torch_ext.comm import group_calls
from torch_ext.grads.norm import Clipping
from torch_ext.native import constants, graph_capture
from torch_ext.native.untraced import untraced
from torch_ext.optim.grad_scaling import GradScaling
from torch_ext.optim.state import masters
from torch_ext.optim.state.param_state import gather_of, gathers_in_order, named
from torch_ext.optim.step_in_backward import StepInBackward
from torch_ext.optim.step_plan import StepBatch, StepPlan, run
from torch_ext.params import param_groups, reducer_registry
from torch_ext.params.param_groups import Params, of_the_innermost
from torch_ext.policy.policy import Policy
from torch_ext.tensors import dense

if TYPE_CHECKING:
    from torch_ext.comm.communicator import Work


_ON_EXTERNAL_WRITE = ("resync", "error", "ignore")


class Stepper(GradScaling):
    """Knows the argument lists of the operator and who wrote to weights in between; saves and loads nothing."""

    # Derived from parameters, state and groups; None where it has to be made again.
    _plan: StepPlan | None
    _hyper: tuple[list[Any], param_groups.HyperparameterTable] | None
    _early: StepInBackward
    _warned: bool

    def __init__(
        self,
        params: Params,
        defaults: dict[str, Any],
        policy: Policy,
        offload_fraction: float,
        skip_nonfinite: bool,
        on_external_write: str,
    ) -> None:
        if on_external_write not in _ON_EXTERNAL_WRITE:
            raise ValueError(f"on_external_write is {on_external_write!r}; {', '.join(_ON_EXTERNAL_WRITE)} are legal")
        self.on_external_write = on_external_write
        super().__init__(params, defaults, policy, offload_fraction, skip_nonfinite)

    def _forget(self) -> None:
        super()._forget()
        self._plan = None
        self._hyper = None
        self._early = StepInBackward()
        self._warned = False

    def _rearranged(self) -> None:
        super()._rearranged()
        self._plan = None

    @untraced
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; returns the closure's loss, if there is a closure.

        Parameters without a gradient are left alone. Raises RuntimeError where a gradient or a parameter is not what
        the operator takes, naming it; nothing has been written then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            for owner in reducer_registry.owners_of(self._everyone()):
                owner.before_step()
        with torch.no_grad():
            self._step()
        return loss

    def _step(self) -> None:
        self._refuse_open("step()")
        everyone = [p for group in self.param_groups for p in group["params"]]
        grads = self.current_shards(everyone).grads()
        self._consolidated = None
        self._refuse_scaler()
        active = [g is not None for g in grads]
        present = cast(list[Tensor], grads) if all(active) else [g for g in grads if g is not None]
        if not present:
            self._warn_of_orphans()
            return
        self._refuse_capture(everyone)
        hyper = self._current_hyper()
        clipping = self._current_clipping(present, active)
        if self._early:
            fits = self._plan is not None and self._plan.fits(everyone, active, self.state)
            self._early.refuse_otherwise(
                fits, clipping is not None or not {"grad_scale", "found_inf"}.isdisjoint(vars(self))
            )
        for again in (False, True):
            plan = self._plan
            if again or plan is None or not plan.fits(everyone, active, self.state):
                plan = self._make_plan(everyone, active, present)
                if plan is None:
                    return
            scalars = self._scalars(clipping)
            try:
                if plan.host is not None:
                    external = masters.MODES[self.on_external_write]
                    sample = self.on_external_write != "ignore"
                    plan.host.begin(plan.theirs(present), hyper, scalars, sample=sample, external=external)
                self._notice_writes(plan)
                plan.load_copies()
                self._run(plan, plan.lay_out(plan.own(present), always=again), hyper, scalars)
            except _Refused as refusal:
                # It wrote nothing. Once more: parameters or gradients may only lie differently than they did so far.
                if again:
                    raise RuntimeError(str(refusal)) from None
            else:
                self._clipped = False
                plan.store_copies()
                torch.autograd.graph.increment_version(plan.params)
                plan.look()
                if clipping is not None:
                    clipping.used = True
                    clipping.warn_if_skipped(plan.everybody, present)
                return
            finally:
                if plan.host is not None:
                    plan.host.end()

    def _warn_of_orphans(self) -> None:
        """A module that loads with assign=True, or is made anew, has other parameters: nobody trains these."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"torch_ext: step() found no gradient for any of {len(self._everyone())} parameters, so nothing was "
                "stepped. If the model's parameters were replaced after this optimizer was made "
                "(load_state_dict(assign=True), to_empty(), a copy of the model), make it from the new ones",
                stacklevel=4,
            )

    def _run(
        self,
        plan: StepPlan,
        grads: list[Tensor],
        hyper: param_groups.HyperparameterTable,
        scalars: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        """The operator, on each chunk; weights travel while later chunks are stepped, and are there afterwards."""
        external = masters.MODES[self.on_external_write]
        if self.on_external_write == "error":
            self._refuse_written(plan, grads, hyper, scalars)
        row = 0  # of the counters: a step that is skipped is counted once
        under_way: list[Work] = []

        def step_own(chunk: StepBatch) -> None:
            nonlocal row
            try:
                if chunk.gather not in self._early:
                    run(plan, chunk, chunk.of(grads), hyper, (*scalars, self._counts[row]), external)
            except RuntimeError as refusal:
                if row or under_way:  # what was stepped already must not be stepped once more
                    raise RuntimeError(_named(str(refusal), plan, chunk)) from None
                raise _Refused(_named(str(refusal), plan, chunk)) from None
            if chunk.weights:
                row = 1

        if plan.host is not None:  # the device has all of its own to do while the host does its part
            for chunk in plan.chunks:
                step_own(chunk)
        for chunk in plan.chunks:
            if plan.host is None:
                step_own(chunk)
            else:
                plan.host.step(chunk.gather)
            if chunk.gather is not None:
                owner, bucket = chunk.gather
                under_way.append(owner.gather(bucket))
        for handle in under_way:
            handle.result()
        self._early.clear()
        if plan.host is not None:
            self._counts[1, 1] += plan.host.resynced
            self._counts[0, 0] += int(plan.host.skipped and row == 0)

    def _notice_writes(self, plan: StepPlan) -> None:
        """What counters, addresses and identities tell; what only the weights themselves do, the operator sees."""
        if self.on_external_write == "ignore":
            return
        suspects = plan.suspects()
        if plan.host is not None:
            suspects += plan.host.suspects()
        if suspects and not plan.same_forms():
            raise _Refused("parameters have other dtypes or shapes than they had")
        if self.on_external_write == "error":
            masters.refuse_written(suspects)
        elif suspects:
            self._counts[1, 1] += masters.resync(suspects).sum()

    def _refuse_written(
        self,
        plan: StepPlan,
        grads: list[Tensor],
        hyper: param_groups.HyperparameterTable,
        scalars: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        """RuntimeError where the operator finds weights that somebody else wrote; nothing is stepped."""
        if plan.host is not None:
            masters.refuse_written([m for m in plan.host.members if m.kinds.master == "master_remainder"])
        for chunk in plan.chunks:
            try:
                run(plan, chunk, chunk.of(grads), hyper, (*scalars, dense.NONE), constants.EXTERNAL_CHECK)
            except RuntimeError as refusal:
                if plan.same_forms():
                    masters.refuse_written([m for m in plan.members if m.kinds.master])
                raise _Refused(_named(str(refusal), plan, chunk)) from None

    def begin_early(self, owner: reducer_registry.GradientReducer) -> Callable[[int], None] | None:
        """See reducer_registry.BucketStepper: buckets are stepped as their sums come, with what groups say now; step()
        gathers."""
        if self.skip_nonfinite:
            raise RuntimeError("step_in_backward=True steps before skip_nonfinite=True can look: leave out one of them")
        if self.policy.clip_grad:
            raise RuntimeError(
                f"step_in_backward=True steps before the norm is known, and the optimizer's policy has "
                f"clip_grad={self.policy.clip_grad}: leave out one of them"
            )
        everyone = self._everyone()
        plan = self._standing(everyone)
        if plan is None or not all(plan.active):
            return None
        self._refuse_capture(everyone)
        with torch.no_grad():
            self._notice_writes(plan)
            if self.on_external_write == "error":
                masters.refuse_written([m for m in plan.members if m.kinds.master])
        external = masters.MODES[self.on_external_write]
        return self._early.begin(owner, plan, self._current_hyper(), self._counts[1], external)

    def refuse_backward(self) -> None:
        """See reducer_registry.BucketStepper."""
        self._early.refuse_again()

    def stepped_early(self) -> bool:
        """See reducer_registry.BucketStepper."""
        return bool(self._early)

    def _make_plan(self, everyone: list[Tensor], active: list[bool], grads: list[Tensor]) -> StepPlan | None:
        """The argument lists of this step, state included; None for a step that is inert."""
        if self._plan is not None:
            self._seen.update(self._plan.seen())
            self._plan = None
        present = set(everyone)
        for gone in [p for p in self.state if isinstance(p, Tensor) and p not in present]:
            dict.pop(self.state, gone)
        self._host.gone(present)
        self._seen = {p: seen for p, seen in self._seen.items() if p in present}
        self._forms = {p: form for p, form in self._forms.items() if p in present}
        first = not any("exp_avg" in self.state_at_rest(p) for p in everyone)
        # DCP calls step with lr 0 and zero gradients to have state made: that is no step (a counter at 1 would make the
        # first real update 1.34 times too small).
        inert = first and all(float(g["lr"]) == 0 for g in self.param_groups) and self._all_zero(grads, active)
        members = self._members(everyone, active)
        if inert:
            self._seen.clear()  # whatever is written before the first step shall be noticed
            return None
        owners = [owner for owner, there in zip(self.current_shards(everyone).owners, active, strict=True) if there]
        gathers = [gather_of(member, owner) for member, owner in zip(members, owners, strict=True)]
        order = gathers_in_order(gathers)
        own = [i for i, member in enumerate(members) if not member.host]
        self._plan = StepPlan(
            [members[i] for i in own],
            everyone,
            active,
            self.state,
            [grads[i] for i in own],
            self._seen,
            [gathers[i] for i in own],
            order,
        )
        self._plan.share(members, self._host.plan(members, gathers, self._seen))
        for owner in set(owners):
            if owner is not None:
                owner.offer(self)
        return self._plan

    def _standing(self, everyone: list[Tensor]) -> StepPlan | None:
        """The last step's plan, where everything is where it was."""
        self.current_shards(everyone)
        plan = self._plan
        fits = plan is not None and plan.fits(everyone, plan.active, self.state) and plan.same_forms()
        return plan if fits else None

    def _all_zero(self, grads: list[Tensor], active: list[bool]) -> bool:
        """On every rank that holds a part of them."""
        something = torch.zeros(1)
        if any(bool(g.any()) for g in grads):
            something.fill_(1)
        assert self._locals is not None
        something = something.to(grads[0].device)
        for group in dict.fromkeys(group for part in self._locals.parts(active) for group in part.groups):
            op = torch.distributed.ReduceOp.MAX
            group_calls.all_reduce(something, group, "step(): whether there are gradients on other ranks", op)
        return not bool(something)

    def _refuse_capture(self, everyone: list[Tensor]) -> None:
        """RuntimeError for what cannot be captured into a CUDA graph, where this is."""
        if not graph_capture.under_way(self._counts.device):
            return
        graph_capture.refuse(
            self.param_groups,
            self._counts.device,
            on_external_write=self.on_external_write,
            stateless=not any("exp_avg" in self.state_at_rest(p) for p in everyone),
            offloaded=any(self.on_host(everyone)),
            grad_scale=self.__dict__.get("grad_scale"),
        )

    def _current_hyper(self) -> param_groups.HyperparameterTable:
        device = self._counts.device
        key = param_groups.key_of(self.param_groups, device)
        if self._hyper is None or self._hyper[0] != key:
            self._hyper = (key, param_groups.hyper(self.param_groups, device))
        return self._hyper[1]

    @untraced
    def _clip(self, max_norm: float) -> Clipping:
        self._early.refuse_clipping()
        return super()._clip(max_norm)

    @of_the_innermost
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's, shards of gradients included. A clip coefficient that no step has applied is forgotten."""
        self._clipping = None
        self._clipped = False
        everyone = self._everyone()
        owners = list(reducer_registry.owners_of(everyone))
        for owner in owners:
            owner.finish_failed_backward()  # what was stepped, when a backward raised, is known then
        if self._early and any(owner.failed for owner in owners):
            self._early.clear()
        elif self._early and self._plan is not None:
            self._early.end(self._plan)
        for owner in owners:
            owner.zero_grad(everyone)
        super().zero_grad(set_to_none)

    def skipped_steps(self) -> int:
        """Steps left out because a gradient was not finite, since the optimizer was made. Waits for the device."""
        return int(self._counts[0, 0])

    def external_writes(self) -> int:
        """Elements of this rank whose masters became their weights because somebody else had written to these, since
        the optimizer was made; in whole blocks of 1024 beside remainders. What `resync_masters` did is not in it. Waits
        for the device."""
        return int(self._counts[:, 1].sum())


class _Refused(Exception):
    """The operator took no argument and wrote nothing."""


def _named(message: str, plan: StepPlan, chunk: StepBatch) -> str:
    """The operator's message, with the parameter it speaks of."""
    rows = range(len(plan.members)) if chunk.rows is None else chunk.rows
    return named(message, [plan.members[i].name for i in rows])
