"""opt.state as a dict that knows whether code outside the optimizer may have changed what is in it.

Note: the arguments of a step refer to state tensors, so a step would have to compare all of them with opt.state. For a
thousand small parameters these are three thousand comparisons, which take 0.8 to 1.9 ms where the step itself takes 0.9
to 1.3 ms (fp32, bf16 with masters; AVX-512, one thread). So opt.state records whether it ever handed out an entry: as
long as it has not, nothing can have changed, and no tensor is compared.

A state_dict, which frameworks ask for before the first step already, hands out no entry: its tensors are others, on the
same memory. Through them values can be written, which matters for masters only (see write_check.py), but no tensor can
be replaced. So opt.state records that apart (`lent`).
"""

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from torch import Tensor

Entry: TypeAlias = dict[str, Any]


def _exposing(name: str) -> Callable[..., Any]:
    """Returns the method of defaultdict with this name, extended to count in `exposed`."""
    method = getattr(defaultdict, name)

    def marked(self: "TrackedState", *arguments: Any, **options: Any) -> Any:
        self.exposed += 1
        return method(self, *arguments, **options)

    marked.__name__, marked.__doc__ = name, method.__doc__
    return marked


class TrackedState(defaultdict[Tensor, Entry]):
    """A defaultdict(dict), as torch's, that counts in `exposed` how often entries are read or written. Looking at keys
    does not count.

    The optimizer itself uses `entry`, `peek` and `entries`. They do not count, and work on any dict that was assigned
    to opt.state in place of this one.
    """

    exposed = 1  # the default, for copies: code outside the optimizer has made them
    lent = False  # whether memory of state tensors was handed out, but no entry
    _make: "weakref.WeakMethod[Callable[[], None]] | None" = None

    @classmethod
    def of(
        cls, entries: dict[Tensor, Entry], exposed: bool, lent: bool = False, make: Callable[[], None] | None = None
    ) -> "TrackedState":
        """make: a method of the optimizer that creates missing state (see `__bool__`)."""
        kept = cls(dict, entries)
        kept.exposed, kept.lent = int(exposed), lent
        kept._make = None if make is None else weakref.WeakMethod(make)
        return kept

    def __bool__(self) -> bool:
        """Whether the dict has entries. Before the first step this first creates all state, as state_dict() does.

        torch.distributed.checkpoint asks `if optim.state`. If that is false it calls step() with zero gradients. If it
        is true it expects complete state, and loads only the keys that it finds here
        (StateDictOptions(flatten_optimizer_state_dict=True)). A new optimizer has step counts only, which would be
        neither empty nor complete.
        """
        if (make := None if self._make is None else self._make()) is not None:
            make()
        return len(self) > 0

    # Where __iter__ is overridden, C code that copies a dict, as {**d} does, calls keys() and __getitem__, which is
    # counted; else it would read the entries directly.
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
    """Returns the entry of p, and creates it where there is none."""
    return dict.setdefault(state, p, {})


def peek(state: dict[Tensor, Entry], p: Tensor) -> Entry:
    """Returns the entry of p, or an empty dict that is not stored."""
    return dict.get(state, p, {})


def entries(state: dict[Tensor, Entry]) -> list[Entry]:
    return list(dict.values(state))


def exposed(state: dict[Tensor, Entry]) -> bool:
    """Whether code outside the optimizer may have changed entries, now or earlier."""
    return not isinstance(state, TrackedState) or state.exposed > 0


def lent(state: dict[Tensor, Entry]) -> bool:
    """Whether code outside the optimizer may have written to state tensors, now or earlier."""
    return exposed(state) or state.lent  # type: ignore[attr-defined]


@contextlib.contextmanager
def lending(state: dict[Tensor, Entry]) -> Iterator[None]:
    """Context of torch's own state_dict(), which reads all entries once, while what it returns holds none of them.
    Further reads are by other code, such as hooks."""
    before = state.exposed if isinstance(state, TrackedState) else 0
    yield
    if isinstance(state, TrackedState):
        state.lent = True
        if state.exposed == before + 1:
            state.exposed = before
