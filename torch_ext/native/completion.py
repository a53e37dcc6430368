"""Runs work that an interrupt (Ctrl-C) must not leave half done."""

from collections.abc import Callable


def complete(work: Callable[[], None]) -> None:
    """Calls `work`. If it raises (KeyboardInterrupt, say), calls it a second time before the error is re-raised.
    `work` must be able to continue, or to start over, wherever it was stopped."""
    try:
        work()
    except BaseException:
        work()
        raise
