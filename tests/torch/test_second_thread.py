"""Calls of another thread at any point of a call, and while C runs. What writes to the optimizer is done before or
after the call, or raises an error that names both. What reads neither raises nor changes what training reaches.
THREADS=1000 tries that many more cases."""

import functools
import io
import os
import random
import re
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from interrupt_programs import CALLS, KINDS, Interrupt, Training
from torch import nn

import torch_ext

MORE = int(os.environ.get("THREADS", "0"))
WRITES = [
    *("step", "zero_grad", "clip_grad_norm_", "load_state_dict", "add_param_group", "resync_masters"),
    *("master_weights, written", "ema_weights", "offload", "publish"),
]
READS = ["state_dict", "a copy", "torch.save", "master_state_dict", "ema_state_dict", "opt.state", "diagnose"]
READ: dict[str, Callable[[Training], Any]] = {
    "state_dict": lambda t: t.optimizer.state_dict(),
    "a copy": lambda t: CALLS["a copy"].interrupted(t),
    "torch.save": lambda t: torch.save((t.model.state_dict(), t.optimizer.state_dict()), io.BytesIO()),
    "master_state_dict": lambda t: [v.float() for v in t.optimizer.master_state_dict().values()],
    "ema_state_dict": lambda t: t.optimizer.averaging.dtype and t.optimizer.ema_state_dict(),
    "opt.state": lambda t: [t.optimizer.state[p]["step"].item() for p in t.model.parameters()],
    "diagnose": lambda t: torch_ext.diagnose(t.model, t.optimizer),
}
REFUSALS = ("within master_weights()", "within ema_weights()", "while load_state_dict() runs")
REFUSALS += ("while add_param_group() runs",)
BOTH = "(.*) while (.*) runs in thread 'MainThread': two calls that write to an optimizer at the same time"


def _error_of(call: Callable[[], Any]) -> str:
    """Returns the text of the RuntimeError that the call raises, or an empty text."""
    try:
        call()
    except RuntimeError as refusal:
        return str(refusal)
    return ""


class Elsewhere(Interrupt):
    """Makes a call in another thread at the point, and waits until it has returned."""

    def __init__(self, at: int, call: Callable[[], Any]) -> None:
        super().__init__(at)
        self._call, self.error = call, ""
        self.failure: Exception | None = None

    def handler(self) -> None:
        thread = threading.Thread(target=self._run)
        thread.start()
        thread.join()

    def _run(self) -> None:
        try:
            self.error = _error_of(self._call)
        except Exception as failure:
            self.failure = failure


def _prepared(kind: str, *calls: str) -> Training:
    """Returns a training for which everything before these calls is done."""
    training = Training(kind)
    for call in sorted(calls, key=["load_state_dict"].count, reverse=True):  # it trains
        CALLS[call].before(training)
    return training


def _found(training: Training) -> Any:
    found: list[Any] = []
    return _error_of(lambda: found.append(training.found())) or found[0]


@functools.cache
def _alone(kind: str, prepared: tuple[str, ...], calls: tuple[str, ...]) -> tuple[list[bool], Any, Any]:
    """Returns whether each of these calls, one after the other, raises, and the state then and after more training."""
    training = _prepared(kind, *prepared)
    errors = [bool(_error_of(functools.partial(CALLS[call].interrupted, training))) for call in calls]
    return errors, _found(training), training.go_on()


@functools.cache
def _points(kind: str, prepared: tuple[str, ...], call: str) -> int:
    training = _prepared(kind, *prepared)
    with Interrupt() as points:
        CALLS[call].interrupted(training)
    return points.count


def _draw(seed: int, among: list[str]) -> tuple[str, str, str, float]:
    """Draws a kind, the call, what another thread calls, and how far in the call it does so."""
    draw = random.Random(f"{seed} {len(among)}")
    while True:
        kind = draw.choice(list(KINDS))
        running, other = draw.choice(["step", *WRITES[:-1]]), draw.choice(among)
        fits = [CALLS[call].fits(KINDS[kind]) for call in (running, other) if call in CALLS]
        if all(fits) and {running, other} != {"offload", "publish"}:
            return kind, running, other, draw.random()


@pytest.mark.parametrize("first", range(0, 24 + MORE, 24))
def test_a_write_of_another_thread_is_before_or_after_the_call_or_raises(first: int) -> None:
    refused = 0
    for seed in range(first, first + 24):
        kind, running, other, far = _draw(seed, WRITES)
        prepared = (running, other)
        training = _prepared(kind, *prepared)
        at = 1 + int(far * _points(kind, prepared, running))
        elsewhere = Elsewhere(at, functools.partial(CALLS[other].interrupted, training))
        with elsewhere:
            error = _error_of(functools.partial(CALLS[running].interrupted, training))
        case = (kind, running, other, elsewhere.where, error, elsewhere.error)
        assert elsewhere.failure is None, (case, elsewhere.failure)
        reached = [bool(error), bool(elsewhere.error)], _found(training), training.go_on()
        alone = _alone(kind, prepared, (running,))
        if re.match(BOTH, elsewhere.error) or any(text in elsewhere.error for text in REFUSALS):
            refused += 1
            assert reached == ([*alone[0], True], *alone[1:]), case
        else:
            later, earlier = _alone(kind, prepared, (running, other)), _alone(kind, prepared, (other, running))
            assert reached in (later, (earlier[0][::-1], *earlier[1:])), case
    assert refused > 3


@pytest.mark.parametrize("first", range(0, 20 + MORE, 20))
def test_a_read_of_another_thread_neither_raises_nor_changes_what_is_reached(first: int) -> None:
    for seed in range(first, first + 20):
        kind, running, other, far = _draw(seed, READS)
        training = _prepared(kind, running)
        at = 1 + int(far * _points(kind, (running,), running))
        elsewhere = Elsewhere(at, functools.partial(READ[other], training))
        with elsewhere:
            CALLS[running].interrupted(training)
        case = (kind, running, other, elsewhere.where, elsewhere.error)
        assert elsewhere.failure is None, (case, elsewhere.failure)
        assert not elsewhere.error or any(text in elsewhere.error for text in (*REFUSALS, "offloaded")), case
        assert (_found(training), training.go_on()) == _alone(kind, (running,), (running,))[1:], case


# -- while C runs --------------------------------------------------------------------------------------------------


def _large(states: str) -> tuple[list[nn.Parameter], torch_ext.AdamW]:
    """Returns parameters and an optimizer whose step is in C for milliseconds, without the GIL."""
    draw = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(200_000, generator=draw).bfloat16()) for _ in range(3)]
    for p in params:
        p.grad = torch.randn(p.shape, generator=draw).bfloat16()
    return params, torch_ext.AdamW(params, lr=0.01, states=states)


def _bits(optimizer: torch_ext.AdamW) -> list[bytes]:
    weights = [p.detach() for group in optimizer.param_groups for p in group["params"]]
    states = [t for entry in optimizer.state_dict()["state"].values() for t in entry.values()]
    return [bytes(t.clone().view(-1).view(torch.uint8).tolist()) for t in (*weights, *states)]


@pytest.mark.parametrize("states", ["bf16", "bf16_remainder", "8bit"])
def test_steps_of_several_threads_follow_one_another_or_raise(states: str) -> None:
    params, optimizer = _large(states)
    refusals, failures, done, end = [], [], [0], threading.Event()

    def steps() -> None:
        while not end.is_set() and len(refusals) < 5:
            try:
                optimizer.step()
                done[0] += 1
            except RuntimeError as refusal:
                refusals.append(str(refusal))

    def reads() -> None:
        while not end.is_set():
            try:
                _ = [t.clone() for entry in optimizer.state_dict()["state"].values() for t in entry.values()]
                torch.save(optimizer.state_dict(), io.BytesIO())
            except Exception as failure:
                failures.append(failure)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=target) for target in (steps, steps, reads)]
        for thread in threads:
            thread.start()
        for thread in threads[:2]:
            thread.join(20.0)
        end.set()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not failures and len(refusals) >= 5
    assert all(re.match(r"step\(\) while step\(\) runs in thread 'Thread-", text) for text in refusals), refusals
    steps_of = {float(optimizer.state[p]["step"]) for p in params}
    _, expected = _large(states)
    for _ in range(int(max(steps_of))):
        expected.step()
    assert len(steps_of) == 1 and _bits(optimizer) == _bits(expected)


def test_a_write_that_finds_the_other_one_just_ended_is_a_write_itself() -> None:
    """The other call ends after this one has found that it runs, and before it would be refused for that."""
    _, optimizer = _large("bf16")
    state, loading, ended, errors = optimizer.state_dict(), threading.Event(), threading.Event(), list[str]()

    def loaded(_optimizer: torch.optim.Optimizer) -> None:
        if threading.current_thread() is first:
            loading.set()
            ended.wait()
        else:
            third = threading.Thread(target=lambda: errors.append(_error_of(optimizer.zero_grad)))
            third.start()
            third.join()

    def trace(frame: Any, event: str, _argument: Any) -> None:
        if event == "call" and frame.f_code.co_name == "refuse" and not ended.is_set():
            ended.set()
            first.join()

    def second_load() -> None:
        sys.settrace(trace)
        optimizer.load_state_dict(state)

    optimizer.register_load_state_dict_post_hook(loaded)
    first = threading.Thread(target=optimizer.load_state_dict, args=(state,))
    second = threading.Thread(target=second_load)
    first.start()
    loading.wait()
    second.start()
    for thread in (second, first):
        thread.join()
    assert ended.is_set() and len(errors) == 1
    assert errors[0].startswith("zero_grad() while load_state_dict() runs in thread"), errors
