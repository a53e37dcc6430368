"""step() opens no region for profilers while none records (Note [the label of a step]): everything that torch's wrapper
of step() does must happen nevertheless."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import torch_ext


class Unchanged(torch_ext.AdamW):
    """A subclass without a step() of its own."""


class Nested(torch_ext.AdamW):
    """A subclass that calls our step() in its own, which torch wraps, too."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return super().step(closure)


KINDS = {"AdamW": torch_ext.AdamW, "Adam": torch_ext.Adam, "Unchanged": Unchanged, "torch": torch.optim.AdamW}


def made(kind: Any) -> Any:
    p = torch.nn.Parameter(torch.ones(8))
    p.grad = torch.ones(8)
    return kind([p], lr=0.1)


def labels_of(opt: Any) -> list[str]:
    with torch.profiler.profile() as profile:
        opt.step()
    return [e.name for e in profile.events() if e.name.startswith("Optimizer.step#")]


@pytest.mark.parametrize("kind", KINDS)
def test_a_profile_has_the_label(kind: str) -> None:
    opt = made(KINDS[kind])
    opt.step()
    assert labels_of(opt) == [f"Optimizer.step#{KINDS[kind].__name__}.step"]
    opt.step()


def test_a_step_within_a_step_has_one_label_as_with_torch() -> None:
    assert labels_of(made(Nested))[0] == "Optimizer.step#Nested.step"


def seen_by_hooks(opt: Any, hooks: ExitStack, pre: bool) -> list[Any]:
    """Returns what hooks, and the closure, of one step were given, in the order of the calls. pre: hooks before the
    step, too."""
    seen = list[Any]()

    def noting(what: str) -> Callable[..., None]:
        return lambda o, args, options: seen.append((what, o is opt, [a is opt for a in args], sorted(options)))

    def closure() -> float:
        seen.append("step")
        hooks.callback(opt.register_step_post_hook(noting("registered in the step")).remove)
        return 0.5

    for register, what in [
        (register_optimizer_step_pre_hook, "global pre"),
        (opt.register_step_pre_hook, "pre"),
        (opt.register_step_post_hook, "post"),
        (register_optimizer_step_post_hook, "global post"),
    ][0 if pre else 2 :]:
        hooks.callback(register(noting(what)).remove)
    assert opt.step(closure=closure) == 0.5
    return seen


@pytest.mark.parametrize("pre", [False, True])
@pytest.mark.parametrize("profiled", [False, True])
@pytest.mark.parametrize("kind", ["AdamW", "Adam", "Unchanged"])
def test_hooks_see_what_torchs_optimizers_show_them(kind: str, profiled: bool, pre: bool) -> None:
    both = []
    for each in (KINDS[kind], torch.optim.AdamW):
        opt = made(each)
        with ExitStack() as hooks:
            if profiled:
                hooks.enter_context(torch.profiler.profile())
            both.append(seen_by_hooks(opt, hooks, pre))
    assert both[0] == both[1] and len(both[0]) == 4 + 2 * pre


ALONE: list[Callable[[Any, Callable[..., None]], Any]] = [
    lambda _opt, hook: register_optimizer_step_pre_hook(hook),
    lambda opt, hook: opt.register_step_pre_hook(hook),
    lambda opt, hook: opt.register_step_post_hook(hook),
    lambda _opt, hook: register_optimizer_step_post_hook(hook),
]


@pytest.mark.parametrize("register", ALONE)
def test_a_hook_alone_is_called_until_it_is_removed(register: Callable[[Any, Callable[..., None]], Any]) -> None:
    opt, seen = made(torch_ext.AdamW), list[Any]()
    handle = register(opt, lambda *_: seen.append(1))
    opt.step()
    handle.remove()
    opt.step()
    assert seen == [1]


def test_a_pre_hook_may_replace_the_arguments() -> None:
    opt = made(torch_ext.AdamW)
    opt.register_step_pre_hook(lambda _o, args, _options: (args, {"closure": lambda: 7}))
    assert opt.step() == 7


@pytest.mark.parametrize("returned", [(), (1, 2, 3), [(), {}], 0])
def test_a_pre_hook_that_returns_something_else_is_an_error_as_with_torch(returned: Any) -> None:
    for kind in (torch_ext.AdamW, torch.optim.AdamW):
        opt = made(kind)
        opt.register_step_pre_hook(lambda *_: returned)
        with pytest.raises(RuntimeError, match="must return None or a tuple of .new_args, new_kwargs."):
            opt.step()
        assert opt.param_groups[0]["params"][0].tolist() == [1.0] * 8


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("records", [False, True])
def test_a_step_leaves_the_grad_mode(records: bool, fails: bool) -> None:
    opt = made(torch_ext.AdamW)
    opt.step()
    if fails:
        opt.param_groups[0]["params"][0].data = torch.ones(3)
    with torch.set_grad_enabled(records):
        try:
            opt.step()
        except (RuntimeError, ValueError):
            assert fails
        assert torch.is_grad_enabled() == records
