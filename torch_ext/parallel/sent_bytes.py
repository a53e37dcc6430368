"""The bytes that a rank sent for one optimizer step: what `wire_bytes()` returns."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_ext.comm.communicator import Communicator


class SentBytes:
    """Counts what was sent for one optimizer step. The count stays after the step until the next step's first backward,
    so that it can be read in between."""

    def __init__(self, *communicators: "Iterable[Communicator]") -> None:
        """communicators: those that send; they are looked up at each count."""
        self._communicators = communicators
        self._first: int | None = None  # what had been sent before this step; None: nothing was sent for any step
        self._end: int | None = None  # what had been sent before the next step's forward; None: it has sent nothing
        self._ended = True

    def begin_forward(self) -> None:
        """Called before weights are gathered for a forward: after a step they count for the next one."""
        if self._ended and self._end is None:
            self._end = self._sent()

    def begin_backward(self) -> None:
        """Called before the messages of a backward: starts a new count if a step was taken."""
        if self._ended:
            self._first, self._end = self._sent() if self._end is None else self._end, None
            self._ended = False

    def end(self) -> None:
        """Called when an optimizer steps these gradients, or skips them because of the loss scale."""
        self._ended = True

    def _sent(self) -> int:
        return sum(one.bytes_sent for some in self._communicators for one in some)

    @property
    def count(self) -> int:
        if self._first is None:
            return 0
        return (self._sent() if self._end is None else self._end) - self._first
