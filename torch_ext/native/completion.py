"""Work that an interrupt must not leave half done."""

from collections.abc import Callable


def complete(work: Callable[[], None]) -> None:
    """Calls it; where it raises, Ctrl-C say, once more, before the error is raised. Must be able to go on, or to begin
    anew, wherever it was stopped."""
    try:
        work()
    except BaseException:
        work()
        raise
