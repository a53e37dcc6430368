"""One run of a StepPlan: what step() does once it is known what to step."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torch_ext.native import constants
from torch_ext.optim.device_step import StepBatch
from torch_ext.optim.grad_scaling import Scalars
from torch_ext.optim.state import masters
from torch_ext.optim.state.param_state import AllGatherTarget
from torch_ext.optim.step_in_backward import StepInBackward
from torch_ext.optim.step_plan import StepPlan
from torch_ext.optim.step_progress import NotStepped, StepProgress
from torch_ext.params.param_groups import HyperparameterTable
from torch_ext.tensors import dense

if TYPE_CHECKING:
    from torch_ext.comm.communicator import Work


class ArgumentsRefused(RuntimeError):
    """An operator rejected its arguments, and nothing was written by this step."""


class StepRun:
    """Steps the parameters of a plan, once."""

    def __init__(
        self,
        plan: StepPlan,
        grads: list[Tensor],
        hyper: HyperparameterTable,
        scalars: Scalars,
        counts: Tensor,
        on_external_write: str,
        progress: StepProgress,
    ) -> None:
        """grads: of the plan's members. counts: `OptimizerStates.counts`."""
        self._plan, self._grads, self._hyper, self._scalars = plan, grads, hyper, scalars
        self._counts, self._on_external_write, self._progress = counts, on_external_write, progress
        self._external = masters.EXTERNAL_MODES[on_external_write]
        self._on_device: list[Tensor] = []  # the gradients, as the operator takes them
        self._row = 0  # of `counts`: 0 for the first operator call, then 1, so that a skipped step is counted once
        self._gathers: list[Work] = []

    def run(self, in_backward: StepInBackward, lay_out: bool) -> None:
        """Steps everything that `in_backward` has not stepped, and all-gathers weights. lay_out: expect gradients in
        any memory order. Raises ArgumentsRefused where the operator rejects its arguments and nothing was written,
        another RuntimeError for any other failure."""
        plan = self._plan
        not_stepped: NotStepped | None = None
        try:
            if plan.host is not None:
                sample = self._on_external_write != "ignore"
                grads = plan.on_host(self._grads)
                plan.host.begin(grads, self._hyper, self._scalars, sample=sample, external=self._external)
            check_signals(plan, self._counts, self._on_external_write)
            plan.device.load_copies()
            self._on_device = plan.device.lay_out(plan.on_device(self._grads), always=lay_out)
            matrices = (
                None
                if plan.matrices is None
                else plan.matrices.begin(
                    plan.of_matrices(self._grads), self._hyper.shared, self._scalars, self._on_external_write
                )
            )
            if self._on_external_write == "error":
                self._check_weights()
            self._step(in_backward)
            plan.device.store_copies()
            if matrices is not None:
                self._progress.wrote = True
                try:
                    matrices.run(self._counts, counted=self._row > 0)
                except NotStepped as failure:
                    not_stepped = failure  # raised below, after the weights that were stepped are all-gathered
                self._gather([batch.gather for batch in plan.device.batches if batch.gather in plan.gathered_late])
        finally:
            if plan.host is not None:
                plan.host.end()
        self._progress.wrote_all = True
        torch.autograd.graph.increment_version(plan.params)
        plan.mark_synced(counted=True)
        self._progress.written()
        for work in self._gathers:
            work.result()
        if not_stepped is not None:
            raise not_stepped

    def _check_weights(self) -> None:
        """Raises RuntimeError where checksums show that weights were modified outside the optimizer. Steps nothing."""
        plan = self._plan
        if plan.host is not None:
            masters.refuse_modified([m for m in plan.host.members if m.kinds.master == "master_remainder"])
        for batch in plan.device.batches:
            try:
                self._call(batch, dense.EMPTY, constants.EXTERNAL_CHECK)
            except RuntimeError as refusal:
                if plan.same_forms():
                    masters.refuse_modified([m for m in plan.device.members if m.kinds.master])
                raise ArgumentsRefused(str(refusal)) from None

    def _step(self, in_backward: StepInBackward) -> None:
        """Steps AdamW's parameters bucket by bucket, and starts a bucket's all-gather once all of it is stepped."""
        host, batches = self._plan.host, self._plan.device.batches
        if host is not None:  # launch all of the device's work first: it runs while the host steps its parameters
            for batch in batches:
                self._step_on_device(batch, in_backward)
        for batch in batches:
            if host is None:
                self._step_on_device(batch, in_backward)
            else:
                self._progress.wrote = True
                host.step(batch.gather)
            if batch.gather is not None and batch.gather not in self._plan.gathered_late:
                self._gather([batch.gather])  # overlaps with the steps of later batches
        in_backward.clear()
        if host is not None:
            self._counts[1, 1] += host.resynced
            self._counts[0, 0] += int(host.skipped and self._row == 0)

    def _gather(self, targets: Sequence[AllGatherTarget]) -> None:
        self._gathers += [owner.gather(bucket) for owner, bucket in filter(None, targets)]

    def _step_on_device(self, batch: StepBatch, in_backward: StepInBackward) -> None:
        """Steps a batch, unless backward has. ArgumentsRefused where it is rejected while nothing is written yet."""
        if batch.gather not in in_backward:
            first, self._progress.wrote = not self._progress.wrote, True
            try:
                self._call(batch, self._plan.device.counters(self._counts, self._row), self._external)
            except RuntimeError as refusal:
                if self._row or self._gathers:  # a retry would step earlier batches twice
                    raise
                self._progress.wrote = not first
                raise ArgumentsRefused(str(refusal)) from None
        if batch.weights:
            self._row = 1

    def _call(self, batch: StepBatch, counts: Tensor, external: int) -> None:
        device, scalars = self._plan.device, (*self._scalars, counts)
        grads = batch.of(self._on_device)
        device.run(batch, device.arguments(batch, grads, self._hyper, scalars, external, in_place=True))


def check_signals(plan: StepPlan, counts: Tensor, on_external_write: str) -> None:
    """Resyncs masters or raises, as on_external_write says, where weights signal a write outside the optimizer: by
    version, address or sample. counts: see `StepRun`."""
    if on_external_write == "ignore":
        return
    modified = plan.modified()
    if modified and not plan.same_forms():
        raise ArgumentsRefused("parameters have other dtypes or shapes than they had")
    if on_external_write == "error":
        masters.refuse_modified(modified)
    elif modified:
        counts[1, 1] += masters.resync(modified).sum()
