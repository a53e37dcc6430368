"""Ctrl-C at any point of any call. The call did nothing, or all of its work, or the next call says what happened;
afterwards training continues with the bits of a run without the interrupt. INTERRUPTS=1000 tries that many more points
of each call."""

import functools
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from interrupt_programs import CALLS, KINDS, Interrupt, Training

# Points that are tried of each call, and again of its last eighth, where a failed call undoes its work. Points are
# drawn from a seed that is named after the case.
EACH = 3
MORE = int(os.environ.get("INTERRUPTS", "0"))
CASES = [(kind, call) for kind in KINDS for call in CALLS if CALLS[call].fits(KINDS[kind])]


@pytest.fixture(autouse=True)
def _autograd_records_afterwards() -> Iterator[None]:
    yield
    assert torch.is_grad_enabled()


def _prepared(kind: str, call: str) -> Training:
    """Returns a training for which everything before the call is done."""
    training = Training(kind)
    CALLS[call].before(training)
    return training


def _found(training: Training) -> Any:
    """Returns everything that training depends on, or the message if that cannot be read."""
    try:
        return training.found()
    except RuntimeError as refusal:
        return str(refusal)


@functools.cache
def _expected(kind: str, call: str) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """Returns the number of points, and for training "without" and "with" the call: everything that it depends on
    afterwards, and what continued training reaches."""
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
    """Makes the call and interrupts it at point `at`. The result's `where` is empty if the call ended before."""
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
    """Whether the weights are equal. Masters may differ: they may have followed their weights already, as the next step
    would make them."""
    return isinstance(one, dict) and all(one[name] == other[name] for name in ("p0", "p1", "p2", "p3", "p4"))


def _check(kind: str, call: str, at: int) -> bool:
    """Interrupts the call at point `at` and checks what it leaves. Returns whether the interrupt happened."""
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
    """Random points of every call of every configuration."""
    points = _points(kind, call)
    assert sum(_check(kind, call, at) for at in points) > len(points) // 2


def test_an_interrupt_at_the_end_of_a_load_into_muon() -> None:
    """At its end the load removes keys that torch has put into the groups."""
    count = _expected("Muon", "load_state_dict")[0]
    for at in range(count - 25, count + 1):
        _check("Muon", "load_state_dict", at)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind].publishes])
def test_an_interrupt_while_a_load_makes_the_optimizers_parts_anew(kind: str) -> None:
    """A load replaces the optimizer's parts. Publishers and measurements must carry on: what they asked for has to be
    in the new parts before the optimizer uses these."""
    count = _expected(kind, "load_state_dict")[0]
    for at in range(count - count // 10, count, 4):  # a smaller step than the stretch in which parts are replaced
        _check(kind, "load_state_dict", at)
