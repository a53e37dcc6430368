"""opt.state, which knows whether anybody else may have changed what is in it.

Note: a step of a thousand small tensors must not compare three thousand states to see that they are still the ones that
its arguments were made of: that takes 0.8 to 1.9 ms beside a step of 0.9 to 1.3 (fp32, bf16 with masters; AVX-512, one
thread). As long as no entry was handed out nobody can have changed one.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from torch import Tensor

Entry: TypeAlias = dict[str, Any]


def _exposing(name: str) -> Callable[..., Any]:
    method = getattr(defaultdict, name)

    def marked(self: "TrackedState", *arguments: Any, **options: Any) -> Any:
        self.exposed = True
        return method(self, *arguments, **options)

    marked.__name__, marked.__doc__ = name, method.__doc__
    return marked


class TrackedState(defaultdict[Tensor, Entry]):
    """A defaultdict(dict), as torch's. Keys may be looked at; whoever gets at an entry, or puts one, is noticed.

    The optimizer itself uses `entry`, `peek` and `entries`, which nobody notices, and which work on any dict that
    somebody put in the place of this one.
    """

    exposed = True  # of a copy, which somebody asked for
    _make: "weakref.WeakMethod[Callable[[], None]] | None" = None

    @classmethod
    def of(cls, entries: dict[Tensor, Entry], exposed: bool, make: Callable[[], None] | None = None) -> "TrackedState":
        """make: a method of the optimizer that makes the state which is missing (see `__bool__`)."""
        kept = cls(dict, entries)
        kept.exposed = exposed
        kept._make = None if make is None else weakref.WeakMethod(make)
        return kept

    def __bool__(self) -> bool:
        """Whether anything is in it. Asked before the first step, state is made, as for a state_dict: zero, inert.

        torch.distributed.checkpoint asks by `if optim.state` and calls step() with zero gradients where there is
        nothing. Where there is something it expects everything, and takes of what it loads the keys that it finds here
        (StateDictOptions(flatten_optimizer_state_dict=True)); steps alone would be neither.
        """
        if (make := None if self._make is None else self._make()) is not None:
            make()
        return len(self) > 0

    # With this, C code that copies a dict, as {**d} does, asks for keys and items instead of reading past us.
    def __iter__(self) -> Iterator[Tensor]:
        return super().__iter__()

    def __reduce__(self) -> Any:
        return defaultdict, (dict,), None, None, iter(self.items())


for _name in (
    *("__getitem__", "__setitem__", "__delitem__", "__or__", "__ror__", "__ior__", "__copy__", "copy", "get", "items"),
    *("values", "pop", "popitem", "setdefault", "update", "clear"),
):
    setattr(TrackedState, _name, _exposing(_name))


def entry(state: dict[Tensor, Entry], p: Tensor) -> Entry:
    """The entry of p, made where there is none."""
    return dict.setdefault(state, p, {})


def peek(state: dict[Tensor, Entry], p: Tensor) -> Entry:
    """The entry of p, or an empty one that is not kept."""
    return dict.get(state, p, {})


def entries(state: dict[Tensor, Entry]) -> list[Entry]:
    return list(dict.values(state))


def exposed(state: dict[Tensor, Entry]) -> bool:
    return not isinstance(state, TrackedState) or state.exposed
