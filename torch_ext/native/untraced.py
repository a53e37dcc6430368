"""torch.compiler.disable for methods, without what it imports before anybody needs it.

It imports torch._dynamo, which takes longer than all of torch_ext. Making any optimizer of torch does so too: then, and
not when a class is defined, methods become what torch.compiler.disable makes of them.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

_F = TypeVar("_F", bound=Callable[..., Any])

_lock = threading.RLock()
_waiting: "list[tuple[type, str, _Untraced]]" = []


def untraced(method: _F) -> _F:
    """The method as torch.compile leaves it to Python; the outermost decorator in the body of a class."""
    return cast(_F, _Untraced(method))


class _Untraced:
    """In the method's place until somebody gets it, or another one."""

    def __init__(self, method: Callable[..., Any]) -> None:
        functools.update_wrapper(cast(Any, self), method)
        self._method = method

    def __set_name__(self, owner: type, name: str) -> None:
        _waiting.append((owner, name, self))

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        with _lock:
            while _waiting:  # all of them: the next one may be gotten while torch.compile looks on
                holder, name, waiting = _waiting[-1]
                waiting._method = torch.compiler.disable(waiting._method)
                if holder.__dict__.get(name) is waiting:
                    setattr(holder, name, waiting._method)
                _waiting.pop()
        return self._method.__get__(instance, owner)
