"""The optimizers that step buckets in backward (step_in_backward=True)."""

import weakref
from collections.abc import Callable

from torch_ext.params import reducer_registry


class BucketSteppers:
    """The optimizers that may step one reducer's buckets. Referred to weakly, since they refer to the reducer."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._steppers: weakref.WeakSet[reducer_registry.BucketStepper] = weakref.WeakSet()

    def add(self, stepper: reducer_registry.BucketStepper) -> None:
        """Adds an optimizer that has state for the reducer's parameters."""
        if self._enabled:
            self._steppers.add(stepper)

    def begin(self, reducer: reducer_registry.GradientReducer, completes: bool) -> list[Callable[[int], None]]:
        """Called when a backward begins. Returns functions that each step one reduced bucket. completes: whether this
        backward completes the gradients. Raises RuntimeError if it would add to gradients that were stepped."""
        for stepper in self._steppers:
            stepper.refuse_backward()
        # With a frozen parameter nothing is stepped here: a bucket's step would step that parameter, too.
        if not completes or not all(p.requires_grad for p in reducer.params):
            return []
        return [step for one in self._steppers if (step := one.begin_stepping(reducer)) is not None]

    def refuse_moving(self, doing: str) -> None:
        """Raises RuntimeError between a backward that stepped buckets and step()."""
        if any(stepper.stepped_in_backward() for stepper in self._steppers):
            raise RuntimeError(
                f"{doing} between a backward that stepped (step_in_backward=True) and step(), which all-gathers the "
                "weights: call step() first"
            )
