"""Which engine reduces a parameter's gradient: how optimizers find it, since they know parameters only."""

import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch_ext._engine import Engine

# Not an attribute of the parameter, which would be pickled with it.
_engines: "dict[int, tuple[weakref.ref[torch.Tensor], weakref.ref[Engine]]]" = {}


def register(engine: "Engine", params: Iterable[torch.Tensor]) -> None:
    """The engine reduces these parameters, until `unregister` or its end."""
    keys = []
    for param in params:
        _engines[id(param)] = (weakref.ref(param), weakref.ref(engine))
        keys.append(id(param))
    weakref.finalize(engine, _forget, keys, weakref.ref(engine))


def unregister(engine: "Engine") -> None:
    """Forgets the engine's parameters."""
    _forget([key for key, (_, owner) in _engines.items() if owner() is engine], weakref.ref(engine))


def _forget(keys: "list[int]", engine: "weakref.ref[Engine]") -> None:
    for key in keys:
        entry = _engines.get(key)
        if entry is not None and entry[1]() in (None, engine()):
            del _engines[key]


def engine_of(param: torch.Tensor) -> "Engine | None":
    """The engine that reduces the parameter's gradient; None where nobody of ours does."""
    entry = _engines.get(id(param))
    return entry[1]() if entry is not None and entry[0]() is param else None


def engines_of(params: Iterable[torch.Tensor]) -> "Iterator[Engine]":
    """Each engine once."""
    seen: set[int] = set()
    for param in params:
        engine = engine_of(param)
        if engine is not None and id(engine) not in seen:
            seen.add(id(engine))
            yield engine
