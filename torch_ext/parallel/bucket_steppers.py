"""The optimizers that step buckets in backward (step_in_backward=True)."""

import weakref
from collections.abc import Callable

from torch_ext.params import reducer_registry


class BucketSteppers:
    """Of one reducer, which they refer to."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._steppers: weakref.WeakSet[reducer_registry.BucketStepper] = weakref.WeakSet()

    def add(self, stepper: reducer_registry.BucketStepper) -> None:
        """It has states for the reducer's parameters."""
        if self._enabled:
            self._steppers.add(stepper)

    def begin(self, reducer: reducer_registry.GradientReducer, completes: bool) -> list[Callable[[int], None]]:
        """A backward begins; each of what is returned steps a bucket that is reduced. completes: whether it completes
        the gradients. RuntimeError where it would add to gradients that were stepped."""
        for stepper in self._steppers:
            stepper.refuse_backward()
        # A frozen parameter is not to be stepped.
        if not completes or not all(p.requires_grad for p in reducer.params):
            return []
        return [step for one in self._steppers if (step := one.begin_stepping(reducer)) is not None]

    def refuse_moving(self, doing: str) -> None:
        """RuntimeError between a backward that stepped and step()."""
        if any(stepper.stepped_in_backward() for stepper in self._steppers):
            raise RuntimeError(
                f"{doing} between a backward that stepped (step_in_backward=True) and step(), which brings the other "
                "ranks' weights: call step() first"
            )
