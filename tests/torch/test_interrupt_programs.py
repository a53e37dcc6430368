"""Ctrl-C at any point of any call: the call did nothing, or all of its work, or the next one says what happened; and
training goes on with the bits of one that was never interrupted. INTERRUPTS=1000 tries as many more points of each."""

import functools
import os
import random
from typing import Any

import pytest
from interrupt_programs import CALLS, KINDS, Interrupt, Training

EACH = 3  # points of each call, and of its last eighth, where what it did is undone; a generator's seed is its name
MORE = int(os.environ.get("INTERRUPTS", "0"))
CASES = [(kind, call) for kind in KINDS for call in CALLS if CALLS[call].fits(KINDS[kind])]


def _prepared(kind: str, call: str) -> Training:
    training = Training(kind)
    CALLS[call].before(training)
    return training


def _found(training: Training) -> Any:
    try:
        return training.found()
    except RuntimeError as refusal:
        return str(refusal)


@functools.cache
def _expected(kind: str, call: str) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """How many points there are; and of training without the call and with it: what is there, and what it comes to."""
    there, later = dict[str, Any](), dict[str, Any]()
    points = Interrupt()
    for name in ("without", "with"):
        for found, end in ((there, _found), (later, Training.go_on)):
            training = _prepared(kind, call)
            if name == "with":
                with Interrupt() as points:
                    CALLS[call].interrupted(training)
            found[name] = end(training)
    return points.count, there, later


def _interrupted(training: Training, call: str, at: int) -> Interrupt:
    """Where it was; `where` is empty if the call ended before."""
    with Interrupt(at) as interrupt:
        try:
            CALLS[call].interrupted(training)
        except KeyboardInterrupt:
            pass
    return interrupt


def _points(kind: str, call: str) -> list[int]:
    draw, count = random.Random(f"{kind}, {call}"), _expected(kind, call)[0]
    begins = [begin for begin in (1, count - count // 8) for _ in range(EACH + MORE)]
    return [draw.randint(max(1, begin), count) for begin in begins] + [count]


def _same_weights(one: Any, other: dict[str, Any]) -> bool:
    """Masters may have followed them already, which the next step would have them do."""
    return isinstance(one, dict) and all(one[name] == other[name] for name in ("p0", "p1", "p2", "p3", "p4"))


def _check(kind: str, call: str, at: int) -> bool:
    """Whether it was interrupted."""
    _, there, later = _expected(kind, call)
    training = _prepared(kind, call)
    where = _interrupted(training, call, at).where
    found = _found(training)
    if "load_state_dict() that was interrupted" in found:
        with pytest.raises(RuntimeError, match=r"step\(\) after a load_state_dict\(\) that was interrupted"):
            training.optimizer.step()
        CALLS[call].interrupted(training)
        found = _found(training)
    possible = [name for name in there if found == there[name]]
    if possible or call != "step":
        assert possible or any(_same_weights(found, each) for each in there.values()), where
        assert training.go_on() in [later[name] for name in possible or later], where
        return bool(where)
    with pytest.raises(
        RuntimeError, match=r"after a step\(\) that was interrupted, or raised, when it had perhaps stepped some"
    ):
        training.optimizer.step()
    assert _found(training) == found, where
    training.go_on()
    return True


@pytest.mark.parametrize(("kind", "call"), CASES)
def test_an_interrupt_anywhere(kind: str, call: str) -> None:
    points = _points(kind, call)
    assert sum(_check(kind, call, at) for at in points) > len(points) // 2


def test_an_interrupt_at_the_end_of_a_load_into_muon() -> None:
    """Where keys are taken out of groups that torch puts there."""
    count = _expected("Muon", "load_state_dict")[0]
    for at in range(count - 25, count + 1):
        _check("Muon", "load_state_dict", at)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind].publishes])
def test_an_interrupt_while_a_load_makes_the_optimizers_parts_anew(kind: str) -> None:
    """Publishers and measurements go on: what they asked for is in the new parts before these are the optimizer's."""
    count = _expected(kind, "load_state_dict")[0]
    for at in range(count - count // 10, count, 4):  # shorter than what there is to look at
        _check(kind, "load_state_dict", at)
