"""Calls step() without torch's label for profilers while none of them records.

Note [the label of a step]

torch wraps the step() of each class of optimizers. The wrapper calls hooks, and opens a record_function region, which
labels the step in a profile ("Optimizer.step#AdamW.step"). Whether or not a profiler records it, the region takes 35 us
on a core where our Python code of a whole step of 148 tensors takes 80. So while none records, we call hooks and step
as that wrapper does, only without the region. While one records, or torch.compile looks at calls, we call torch's
wrapper.
"""

import functools
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

from torch_ext.native.untraced import may_trace, while_untraced


class LabelledOptimizer(torch.optim.Optimizer):
    """A torch.optim.Optimizer whose step() opens no region for profilers while none records."""

    def _patch_step_function(self) -> None:
        """Extends torch's method, which wraps the step() of this object's class if it isn't wrapped yet. If a torch
        without this method wraps in another way, then its wrapper is what is called."""
        kind = type(self)
        own = kind.step
        super()._patch_step_function()
        wrapped = kind.step
        if wrapped is not own and getattr(wrapped, "__wrapped__", None) is own:
            kind.step = _labelled_if_recorded(wrapped, own)  # type: ignore[method-assign]


def _labelled_if_recorded(labelled: Callable[..., Any], step: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that calls `labelled`, torch's wrapper of `step`, while a profiler records."""
    step = while_untraced(step)

    @functools.wraps(labelled)
    def stepped(*args: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling() or may_trace() or torch._C._autograd._profiler_enabled():
            return labelled(*args, **options)
        optimizer = args[0]
        before_all, before = torch_optimizer._global_optimizer_pre_hooks, optimizer._optimizer_step_pre_hooks
        if before_all or before:
            for hook in chain(before_all.values(), before.values()):
                args, options = _arguments_of(hook, optimizer, args, options)
        result = step(*args, **options)
        optimizer._optimizer_step_code()  # torch's, empty: a place for profilers
        after, after_all = optimizer._optimizer_step_post_hooks, torch_optimizer._global_optimizer_post_hooks
        if after or after_all:
            for hook in chain(after.values(), after_all.values()):
                hook(optimizer, args, options)
        return result

    stepped.hooked = True  # type: ignore[attr-defined]  # as torch marks what it need not wrap again
    return stepped


def _arguments_of(
    hook: Callable[..., Any], optimizer: Any, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Any, Any]:
    """Calls a hook before the step. Returns the step's arguments, which it may replace."""
    changed = hook(optimizer, args, options)
    if changed is None:
        return args, options
    if not isinstance(changed, tuple) or len(changed) != 2:
        raise RuntimeError(f"{hook} must return None or a tuple of (new_args, new_kwargs), but got {changed}.")
    return changed
