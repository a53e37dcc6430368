"""step_in_backward: what an optimizer has stepped before its step() was called."""

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
    """The buckets that were stepped since the last step(), each by its StepBatch.gather."""

    def __init__(self) -> None:
        self._stepped: set[tuple[GradientReducer, int] | None] = set()
        self._anywhere = False  # whether some rank may have stepped something, though this one may have no part of it

    def __bool__(self) -> bool:
        """The same on every rank."""
        return self._anywhere

    def __contains__(self, gather: "tuple[GradientReducer, int] | None") -> bool:
        return gather in self._stepped

    def clear(self) -> None:
        """step() has stepped the rest."""
        self._stepped.clear()
        self._anywhere = False

    def begin(
        self, owner: "GradientReducer", plan: StepPlan, hyper: HyperparameterTable, counts: Tensor, external: int
    ) -> Callable[[int], None]:
        """What steps a bucket of the owner whose sum is ready. Any thread. A bucket of which a part is stepped on the
        host is left to step(). counts, external: see `DeviceStep.run`."""
        shared = () if plan.host is None else plan.host.gathers
        batches = {b.gather[1]: b for b in plan.device.batches if b.gather is not None and b.gather[0] is owner}
        scalars = (dense.NONE, dense.NONE, dense.NONE, counts)

        def step(bucket: int) -> None:
            batch = batches.get(bucket)
            self._anywhere |= batch is not None
            if batch is not None and batch.rows is not None and batch.gather not in shared:
                parts = [owner.part(plan.device.members[i].param) for i in batch.rows]
                self._stepped.add(batch.gather)
                plan.device.run(batch, parts, hyper, scalars, external)

        return step

    def end(self, plan: StepPlan) -> None:
        """No step() follows: what was stepped stays stepped, on every rank. Collective."""
        for handle in [
            owner.gather(bucket) for owner, bucket in filter(None, (batch.gather for batch in plan.device.batches))
        ]:
            handle.result()
        torch.autograd.graph.increment_version(plan.params)
        plan.mark_synced()
        self.clear()

    def refuse_again(self) -> None:
        """RuntimeError where gradients would be applied that were applied already."""
        if self:
            raise RuntimeError(
                "a second backward before step(): step_in_backward=True, so the first one's gradients were applied "
                "already. Accumulate under no_sync(), or call step() and zero_grad() first"
            )

    def refuse_clipping(self) -> None:
        """RuntimeError where it is too late for that."""
        if self:
            raise RuntimeError("step_in_backward=True: gradients were applied before they were clipped")

    def refuse_otherwise(self, fits: bool, scaled: bool) -> None:
        """RuntimeError where step() would do something else than what backward did already. fits: its plan is the one
        that backward stepped by; scaled: gradients are to be clipped or unscaled."""
        if scaled:
            raise RuntimeError("step_in_backward=True: gradients were applied before they were clipped or unscaled")
        if not fits:
            raise RuntimeError(
                "step_in_backward=True: parameters, their gradients or opt.state were replaced between backward and "
                "step(), after some of them had been stepped"
            )
