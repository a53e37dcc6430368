"""What stands for gloo's messages in tests without ranks."""

from collections.abc import Callable


class Work:
    """What gloo makes of a message; arrives: what happens when it is waited for."""

    def __init__(self, arrives: Callable[[], object] = lambda: None) -> None:
        self.waits, self._arrives, self._completed = 0, arrives, False

    def wait(self) -> None:
        self.waits += 1
        self._arrives()
        self._completed = True

    def is_completed(self) -> bool:
        return self._completed
