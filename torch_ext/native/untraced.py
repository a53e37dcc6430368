"""torch.compiler.disable for methods, applied when such a method is first looked up.

torch.compiler.disable imports torch._dynamo, which takes longer than importing torch_ext. When a class is defined, that
time would be lost. At the first lookup it is not: constructing any torch optimizer imports torch._dynamo, too.
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
    """Decorator of a method that torch.compile must not trace. Must be the outermost one, in the body of a class."""
    return cast(_F, _Untraced(method))


class _Untraced:
    """Stands for the method in its class, until any method decorated with `untraced` is looked up."""

    def __init__(self, method: Callable[..., Any]) -> None:
        functools.update_wrapper(cast(Any, self), method)
        self._method = method

    def __set_name__(self, owner: type, name: str) -> None:
        _waiting.append((owner, name, self))

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        with _lock:
            while _waiting:  # replace all of them: the next lookup may be while torch.compile traces
                holder, name, waiting = _waiting[-1]
                waiting._method = torch.compiler.disable(waiting._method)
                if holder.__dict__.get(name) is waiting:
                    setattr(holder, name, waiting._method)
                _waiting.pop()
        return self._method.__get__(instance, owner)


_callback: Callable[[], object] | None = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", None)


def while_untraced(method: _F) -> _F:
    """Returns what a decorated method is while `may_trace` is False: the method itself. torch's wrapper, which then has
    no effect, takes 3 us."""
    return method if _callback is None else cast(_F, getattr(method, "_torchdynamo_orig_callable", method))


def may_trace() -> bool:
    """Whether torch.compile looks at this thread's calls."""
    return _callback is not None and _callback() is not None
