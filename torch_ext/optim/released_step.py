"""A step of a few parameters at a time, in the order in which their gradients are ready (optim/gradient_release.py)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_ext.optim.device_step import StepBatch
from torch_ext.optim.step_plan import StepPlan
from torch_ext.params.param_groups import HyperparameterTable
from torch_ext.tensors import dense


class ReleasedStep:
    """Steps members of a plan, some at a time; kept from backward to backward as long as the plan fits."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self._rows = {id(m.param): row for row, m in enumerate(plan.device.members)}
        self._batches: dict[tuple[int, ...], StepBatch] = {}  # by the rows that they step

    def begin(self, hyper: HyperparameterTable, counts: Tensor, external: int) -> None:
        """Called when a backward begins. counts, external: see `DeviceStep.run`."""
        self._hyper, self._external = hyper, external
        self._scalars = dense.EMPTY, dense.EMPTY, dense.EMPTY, counts

    def steppable(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Returns the parameters that may be stepped before the others: AdamW's on the device that need no copy."""
        in_place = self.plan.device.in_place
        return [p for p in params if (row := self._rows.get(id(p))) is not None and in_place(row)]

    def run(self, params: Sequence[Tensor]) -> None:
        """Steps the parameters, which `steppable` has returned. RuntimeError, naming the parameter, where the operator
        rejects a gradient: none of these parameters was stepped then."""
        device, rows = self.plan.device, tuple(self._rows[id(p)] for p in params)
        grads = [device.lay_out_one(row, _grad_of(p)) for row, p in zip(rows, params, strict=True)]
        batch = self._batches.get(rows)
        if batch is None:
            batch = self._batches[rows] = device.batch_of(list(rows))
        device.run(batch, device.arguments(batch, grads, self._hyper, self._scalars, self._external))
        torch.autograd.graph.increment_version(params)


def _grad_of(p: Tensor) -> Tensor:
    grad = p.grad
    assert grad is not None
    return grad.detach() if grad.requires_grad else grad
