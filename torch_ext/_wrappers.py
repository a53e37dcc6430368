"""Optimizers that a framework wrapped in one of its own."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

Method = TypeVar("Method", bound=Callable[..., Any])


def innermost(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that a framework (Accelerate, Lightning) wrapped in one of its own."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer


def of_the_innermost(method: Method) -> Method:
    """Lightning's wrapper has our methods, but writes of its own, which the step would never see: called on it, the
    method is called on the optimizer inside."""

    @functools.wraps(method)
    def called(self: Any, *args: Any, **options: Any) -> Any:
        return method(innermost(self), *args, **options)

    return cast(Method, called)
