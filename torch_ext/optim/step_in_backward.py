"""step_in_backward of a parallelized model: the buckets that were stepped before step() is called."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torch_ext.optim.step_plan import StepPlan
from torch_ext.params.param_groups import HyperparameterTable
from torch_ext.tensors import dense

if TYPE_CHECKING:
    from torch_ext.params.reducer_registry import GradientReducer


class StepInBackward:
    """The buckets that were stepped in backward since the last step(), each identified by its StepBatch.gather."""

    def __init__(self) -> None:
        self._stepped: set[tuple[GradientReducer, int] | None] = set()
        self._on_any_rank = False  # whether a rank may have stepped a bucket, even one without parts on this rank

    def __bool__(self) -> bool:
        """Whether any rank may have stepped a bucket; the same on every rank."""
        return self._on_any_rank

    def __contains__(self, gather: "tuple[GradientReducer, int] | None") -> bool:
        return gather in self._stepped

    def clear(self) -> None:
        """Called when step() has stepped all other buckets."""
        self._stepped.clear()
        self._on_any_rank = False

    def begin(
        self, owner: "GradientReducer", plan: StepPlan, hyper: HyperparameterTable, counts: Tensor, external: int
    ) -> Callable[[int], None]:
        """Returns a function that steps a bucket of the owner once it is reduced, on any thread. A bucket that has a
        parameter on the host is left to step(). counts, external: see `DeviceStep.run`."""
        shared = () if plan.host is None else plan.host.gathers
        batches = {b.gather[1]: b for b in plan.device.batches if b.gather is not None and b.gather[0] is owner}
        scalars = (dense.EMPTY, dense.EMPTY, dense.EMPTY, counts)

        def step(bucket: int) -> None:
            batch = batches.get(bucket)
            self._on_any_rank |= batch is not None
            if batch is not None and batch.rows is not None and batch.gather not in shared:
                parts = [owner.part(plan.device.members[i].param) for i in batch.rows]
                self._stepped.add(batch.gather)
                plan.device.run(batch, plan.device.arguments(batch, parts, hyper, scalars, external))

        return step

    def end(self, plan: StepPlan) -> None:
        """Ends the step without step(): what was stepped stays stepped, and is all-gathered. Collective."""
        for handle in [
            owner.gather(bucket) for owner, bucket in filter(None, (batch.gather for batch in plan.device.batches))
        ]:
            handle.result()
        torch.autograd.graph.increment_version(plan.params)
        plan.mark_synced()
        self.clear()

    def refuse_second_backward(self) -> None:
        """Raises RuntimeError where a backward would add to gradients that were applied already."""
        if self:
            raise RuntimeError(
                "a second backward before step(): step_in_backward=True, so the first one's gradients were applied "
                "already. Accumulate under no_sync(), or call step() and zero_grad() first"
            )

    def refuse_clipping(self) -> None:
        """Raises RuntimeError where gradients were applied already, so that it is too late to clip them."""
        if self:
            raise RuntimeError("step_in_backward=True: gradients were applied before they were clipped")

    def refuse_different_step(self, fits: bool, scaled: bool) -> None:
        """Raises RuntimeError where step() would step differently than backward has. fits: the plan of backward still
        fits. scaled: gradients are to be clipped or unscaled."""
        if scaled:
            raise RuntimeError("step_in_backward=True: gradients were applied before they were clipped or unscaled")
        if not fits:
            raise RuntimeError(
                "step_in_backward=True: parameters, their gradients or opt.state were replaced between backward and "
                "step(), after some of them had been stepped"
            )
