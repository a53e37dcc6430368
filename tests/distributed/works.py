"""A stand-in for gloo's messages, for tests without ranks."""

from collections.abc import Callable


class Work:
    """Has the interface of torch.distributed.Work. arrives: called by `wait`, for the message's arrival."""

    def __init__(self, arrives: Callable[[], object] = lambda: None) -> None:
        self.waits, self._arrives, self._completed = 0, arrives, False

    def wait(self) -> None:
        self.waits += 1
        self._arrives()
        self._completed = True

    def is_completed(self) -> bool:
        return self._completed
