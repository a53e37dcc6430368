"""in_use(): whether an object is still held by running code, or only by frames of tracebacks that have been kept."""

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from torch_ext.parallel.in_use import in_use


class Thing:
    """Like an optimizer, which is part of reference cycles."""

    def __init__(self) -> None:
        self.own = [self]

    def raises(self) -> None:
        raise RuntimeError("it failed")


KEPT: list[Any] = []


@pytest.fixture(autouse=True)
def _let_go() -> Iterator[None]:
    yield
    KEPT.clear()


def _failed(thing: Thing, *, keep: Callable[[BaseException], object]) -> None:
    """Raises and catches an error whose traceback's frames hold the thing, as variables of several functions; gives the
    error to `keep`."""
    also = {"thing": thing}
    try:
        also["thing"].raises()
    except RuntimeError as error:
        keep(error)


def _by_traceback() -> "weakref.ref[Thing]":
    thing = Thing()
    thing.step = thing.raises  # type: ignore[attr-defined]
    _failed(thing, keep=KEPT.append)
    return weakref.ref(thing)


def _by_error_of_a_generator() -> "weakref.ref[Thing]":
    """The error was raised in a generator, whose frame holds the thing."""

    def steps(thing: Thing) -> Iterator[None]:
        yield
        thing.raises()

    thing = Thing()
    going = steps(thing)
    next(going)
    try:
        next(going)
    except RuntimeError as error:
        KEPT.append(error)
    return weakref.ref(thing)


def _by_what_only_frames_hold() -> "weakref.ref[Thing]":
    """The thing is held by objects that only the traceback's frames hold."""
    thing = Thing()
    scheduler = {"optimizer": [functools.partial(thing.raises)]}
    try:
        scheduler["optimizer"][0]()
    except RuntimeError as error:
        KEPT.append((error, "a note"))
    return weakref.ref(thing)


def _by_nobody() -> "weakref.ref[Thing]":
    thing = Thing()  # garbage, in a cycle
    return weakref.ref(thing)


NOT_IN_USE = [_by_traceback, _by_error_of_a_generator, _by_what_only_frames_hold, _by_nobody]


@pytest.mark.parametrize("holding", NOT_IN_USE)
def test_what_only_tracebacks_hold_is_not_in_use(holding: Callable[[], Any]) -> None:
    assert not in_use(holding())


def _global(thing: Thing) -> None:
    KEPT.append(thing)


def _scheduler(thing: Thing) -> None:
    KEPT.append({"optimizer": thing, "rates": [0.1]})


def _bound_method(thing: Thing) -> None:
    KEPT.append(thing.raises)


def _closure(thing: Thing) -> None:
    KEPT.append(lambda: thing.raises())


def _generator(thing: Thing) -> None:
    def steps() -> Iterator[None]:
        yield
        thing.raises()

    KEPT.append(steps())
    next(KEPT[-1])


def _many(thing: Thing) -> None:
    KEPT.append([[thing] for _ in range(1000)])


HOLDING = [_global, _scheduler, _bound_method, _closure, _generator, _many]


@pytest.mark.parametrize("failed", [False, True], ids=["", "and a traceback"])
@pytest.mark.parametrize("holding", HOLDING)
def test_what_something_else_holds_is_in_use(holding: Callable[[Thing], None], failed: bool) -> None:
    def prepared() -> "weakref.ref[Thing]":
        thing = Thing()
        holding(thing)
        if failed:
            _failed(thing, keep=KEPT.append)
        return weakref.ref(thing)

    assert in_use(prepared())


@pytest.mark.parametrize("directly", [True, False], ids=["", "through another object"])
@pytest.mark.parametrize("failed", [False, True], ids=["", "and a traceback"])
def test_a_variable_of_a_function_that_runs_is_a_use(failed: bool, directly: bool) -> None:
    def made() -> Thing:
        thing = Thing()
        if failed:
            _failed(thing, keep=KEPT.append)
        return thing

    held = made() if directly else {"optimizer": made()}
    assert in_use(weakref.ref(held["optimizer"] if isinstance(held, dict) else held))
    del held


def test_a_variable_of_another_thread_is_a_use() -> None:
    made, over = threading.Event(), threading.Event()

    def work() -> None:
        thing = Thing()
        KEPT.append(weakref.ref(thing))
        made.set()
        over.wait()
        del thing

    worker = threading.Thread(target=work)
    worker.start()
    made.wait()
    try:
        assert in_use(KEPT[0])
    finally:
        over.set()
        worker.join()
