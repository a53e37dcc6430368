"""Which reducers are told that a step begins and that it has written everything."""

from collections.abc import Sequence

from torch_ext.params.reducer_registry import GradientReducer


class StepProgress:
    """Of one step. What raises in it before anything was written leaves every rank as it was; what raises, or
    interrupts, later has parted this rank from the others, which its reducers remember."""

    def __init__(self, reducers: Sequence[GradientReducer]) -> None:
        self._reducers = reducers
        self.wrote = False
        for reducer in reducers:
            reducer.step_begins()

    def written(self) -> None:
        """Everything, and all gathers have begun."""
        for reducer in self._reducers:
            reducer.step_written()

    def refused(self) -> None:
        """The step raised."""
        if not self.wrote:
            self.written()
