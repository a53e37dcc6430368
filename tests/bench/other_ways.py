"""The ways to take a step that torch_ext takes only where it has to (`torch_ext/native/direct_call.py`)."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from torch_ext.native import direct_call

Step = Callable[[], object]


def under(context: Callable[[], AbstractContextManager[object]], step: Step) -> Callable[[], None]:
    """Returns a function that calls step() in a new context each time."""

    def within() -> None:
        with context():
            step()

    return within


def not_repeated(step: Step) -> Callable[[], None]:
    """A step that may not repeat the one before in one call of the library."""
    return under(lambda: _refused("repeat"), step)


def dispatched(step: Step) -> Callable[[], None]:
    """A step through torch's dispatcher."""
    return under(lambda: _refused("repeat", "run"), step)


@contextmanager
def _refused(*names: str) -> Iterator[None]:
    """Context in which these functions of direct_call say that they cannot be used."""
    known = {name: getattr(direct_call, name) for name in names}
    vars(direct_call).update(dict.fromkeys(names, lambda *_: False))
    try:
        yield
    finally:
        vars(direct_call).update(known)
