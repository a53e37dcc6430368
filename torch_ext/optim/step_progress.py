"""The progress of a step: listeners (gradient reducers) are told when it begins and when it has written all weights."""

from collections.abc import Sequence

from torch_ext.params.reducer_registry import StepListener


class NotStepped(RuntimeError):
    """Some parameters were not stepped, all others were; the same ones on every rank, and every rank raises this."""


class RunningStep:
    """Holds the progress of the step that is running."""

    progress: "StepProgress | None" = None


class StepProgress:
    """What one step has written so far.

    A step that raises before it has written anything leaves this rank in sync with the others. If it raises or is
    interrupted later, the ranks' weights differ: the listeners are then not told `step_written`, and the next backward
    or step raises."""

    def __init__(self, listeners: Sequence[StepListener], running: RunningStep) -> None:
        """running: is told of this object, for as long as the step runs."""
        self._listeners, self._running = listeners, running
        self.wrote = False
        self.wrote_all = False
        for listener in listeners:
            listener.step_begins()

    def written(self) -> None:
        """Tells the listeners that all weights are written, and all all-gathers started."""
        for listener in self._listeners:
            listener.step_written()

    def __enter__(self) -> "StepProgress":
        self._running.progress = self
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._running.progress = None
        if kind is None or (issubclass(kind, Exception) and not self.wrote):
            self.written()
