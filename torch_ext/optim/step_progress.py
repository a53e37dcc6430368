"""What a step tells: reducers, that it begins and that it has written everything; who called it, that it has not."""

from collections.abc import Sequence

from torch_ext.params.reducer_registry import StepListener


class NotStepped(RuntimeError):
    """Some parameters were not stepped, the same on every rank, which all know: the others were."""


class StepProgress:
    """Of one step. What raises in it before anything was written leaves every rank as it was; what raises, or
    interrupts, later has parted this rank from the others, which they remember."""

    def __init__(self, listeners: Sequence[StepListener]) -> None:
        self._listeners = listeners
        self.wrote = False
        self.wrote_all = False
        for listener in listeners:
            listener.step_begins()

    def written(self) -> None:
        """Everything, and all gathers have begun."""
        for listener in self._listeners:
            listener.step_written()

    def __enter__(self) -> "StepProgress":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or (issubclass(kind, Exception) and not self.wrote):
            self.written()
