"""A signal handler that saves at any point of any call. It gets the state before or after the call, or an error that
says why not, and training continues with the bits of a run without signals. HANDLERS=100 tries that many more points of
each call."""

import copy
import functools
import io
import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from interrupt_programs import CALLS, KINDS, Interrupt, Training

MORE = int(os.environ.get("HANDLERS", "0"))
CASES = [(kind, call) for kind in KINDS for call in CALLS if CALLS[call].fits(KINDS[kind])]


def _saved(training: Training) -> None:
    torch.save((training.model.state_dict(), training.optimizer.state_dict()), io.BytesIO())


def _copied(training: Training) -> None:
    copy.deepcopy((training.model, training.optimizer))


HANDLERS: list[Callable[[Training], Any]] = [Training.found, _saved, _copied]


class Handler(Interrupt):
    """Calls a function at the point instead of raising, and keeps its result or its error's text."""

    found: Any = None

    def __init__(self, at: int, doing: Callable[[], Any]) -> None:
        super().__init__(at)
        self._doing = doing

    def handler(self) -> None:
        try:
            self.found = self._doing()
        except RuntimeError as refusal:
            self.found = str(refusal)


def _found(training: Training) -> Any:
    """Returns everything that training depends on, or the message if that cannot be read."""
    try:
        return training.found()
    except RuntimeError as refusal:
        return str(refusal)


def _prepared(kind: str, call: str) -> Training:
    """Returns a training for which everything before the call is done."""
    training = Training(kind)
    CALLS[call].before(training)
    return training


@functools.cache
def _expected(kind: str, call: str) -> tuple[int, list[Any], Any]:
    """Returns the number of points, the states before and after the call, and what continued training reaches."""
    before, training = _found(_prepared(kind, call)), _prepared(kind, call)
    with Interrupt() as points:
        CALLS[call].interrupted(training)
    after, training = _found(training), _prepared(kind, call)
    CALLS[call].interrupted(training)
    return points.count, [before, after], training.go_on()


_REFUSALS = ("within master_weights()", "within ema_weights()", "offloaded", "load_state_dict() that was interrupted")
_REFUSALS += ("when it has stepped some of the parameters and not the others", "while add_param_group() runs")


@pytest.mark.parametrize(("kind", "call"), CASES)
def test_a_handler_that_saves(kind: str, call: str) -> None:
    count, there, later = _expected(kind, call)
    draw = random.Random(f"{kind}, {call}")
    for doing in HANDLERS * (1 + MORE):
        training = _prepared(kind, call)
        handler = Handler(draw.randint(1, count), functools.partial(doing, training))
        with handler:
            CALLS[call].interrupted(training)
        assert training.go_on() == later, handler.where
        refused = isinstance(handler.found, str)
        assert not refused or any(text in handler.found for text in _REFUSALS), handler.where
        if handler.where and doing is Training.found and not refused:
            assert handler.found in there, handler.where
