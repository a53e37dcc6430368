"""A step like the one before it, in one call of the library.

Note [repeated steps]

Problem. Most steps differ from the one before in gradients and learning rates only. step() finds that out piece by
piece, in 90 function calls and five passes over the tensors. On the host of an H200 that was half of the 130 us that a
step of 148 tensors took.

So after a step, what it has found is kept. The next step first asks whether all of it still holds: each object that a
step depends on says so for itself, in a comparison or two, and C compares parameters and their version counters while
it reads them. Whatever is not as it was leads to the usual path, which has written nothing by then, finds the
difference again, and acts on it.
"""

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from torch_ext.grads.norm import Clipping
from torch_ext.native import direct_call, graph_capture, ops
from torch_ext.optim.current_hyper import CurrentHyper
from torch_ext.optim.device_step import OPERATOR, StepBatch
from torch_ext.optim.grad_scaling import GradScaling
from torch_ext.optim.state import masters
from torch_ext.optim.step_in_backward import StepInBackward
from torch_ext.optim.step_plan import StepPlan
from torch_ext.params.param_groups import HyperparameterTable
from torch_ext.params.shard_map import ShardMap

if TYPE_CHECKING:
    from torch_ext.optim.optimizer_states import OptimizerStates, Settings


class RepeatedStep:
    """Steps the parameters of the last step's plan again. `run` says whether it could."""

    def __init__(
        self, states: "OptimizerStates", scaling: GradScaling, in_backward: StepInBackward, hyper: CurrentHyper
    ) -> None:
        self._states, self._scaling, self._in_backward, self._hyper = states, scaling, in_backward, hyper
        self._followed: StepPlan | None = None
        self.follow(None, None)

    def follow(self, shards: ShardMap | None, plan: StepPlan | None) -> None:
        """Called after each step that was taken the usual way, with its plan, and with None when the plan is dropped.
        Only a plan that takes one call of the operator, for the parameters themselves, is repeated."""
        if plan is not None and plan is self._followed:
            return
        self._followed, self._shards = plan, shards
        covered = plan is not None and shards is not None and shards.plain and plan.writes.covers(plan.params)
        self._batch = plan.only_batch if plan is not None and covered else None
        self._arguments_of: tuple[HyperparameterTable, Clipping | None, tuple[str, int]] | None = None
        self._arguments: tuple[Any, ...] = ()

    def run(self) -> bool:
        """Takes a step and returns True; returns False, and has written nothing, where step() must take it the usual
        way."""
        plan, batch, states = self._followed, self._batch, self._states
        if plan is None or batch is None:
            return False
        optimizer, device = states.optimizer, states.counts.device
        if not self._fits(plan, optimizer, device):
            return False
        try:
            hyper = self._hyper.table(optimizer.adamw_groups, device, keeps=False)
        except (ValueError, TypeError):
            return False  # illegal values: the usual way raises, unless there is nothing to step
        clipping = self._scaling.clipping
        clipped = [] if clipping is None else _clipped_grads(plan, clipping)
        if clipped is None:
            return False
        arguments = self._current_arguments(plan, batch, hyper, clipping, optimizer.on_external_write)
        groups = optimizer.param_groups
        params = groups[0]["params"] if len(groups) == 1 else states.all_params()
        if not ops.repeat(OPERATOR, arguments, params, *plan.writes.expected, batch.notes):
            return False
        torch.autograd.graph.increment_version(plan.params)
        plan.writes.mark_repeated()
        self._scaling.end_step(clipping, plan.members, clipped)
        return True

    def _fits(self, plan: StepPlan, optimizer: "Settings", device: torch.device) -> bool:
        """Whether a step now would do the same as the one before, as far as it is not up to parameters, gradients and
        groups."""
        shards = self._shards
        return (
            shards is not None
            and shards.still_plain
            and self._scaling.applies_at_most_clipping()
            and not self._in_backward
            and optimizer.on_external_write != "error"
            and plan.same_states(optimizer.state)
            and not graph_capture.is_capturing(device)
        )

    def _current_arguments(
        self, plan: StepPlan, batch: StepBatch, hyper: HyperparameterTable, clipping: Clipping | None, mode: str
    ) -> tuple[Any, ...]:
        """Returns the operator's arguments; the same tuple as long as they are unchanged. mode: on_external_write."""
        device = plan.device
        known, others = self._arguments_of, (mode, device.addresses)
        if known is None or known[0] is not hyper or known[1] is not clipping or known[2] != others:
            self._arguments_of = hyper, clipping, others
            scalars = (*self._scaling.scalars(clipping), device.counters(self._states.counts, 0))
            external = masters.EXTERNAL_MODES[mode]
            self._arguments = device.arguments(batch, [], hyper, scalars, external, in_place=True)
        return self._arguments


def _clipped_grads(plan: StepPlan, clipping: Clipping) -> list[Tensor] | None:
    """Returns the gradients of the plan's parameters if they are those that were clipped; else None."""
    grads, missing = direct_call.grads(plan.params)
    present = cast(list[Tensor], grads)
    try:
        return present if missing == 0 and clipping.belongs_to(present) else None
    except RuntimeError:  # they were written since: the usual way raises
        return None
