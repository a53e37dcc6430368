"""Finds the optimizers inside wrappers (mixed precision, chains, frameworks), and reads their groups and states."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

# Attributes with the wrapped optimizers: Megatron-LM, DeepSpeed, Accelerate, apex ("optimizer"), Lightning
# ("_optimizer"), ZeroRedundancyOptimizer and OSS ("optim"), chains, and a hybrid optimizer's parts on several devices.
_INNER = ("optimizer", "_optimizer", "optim", "chained_optimizers", "sub_optimizers", "optimizers")


def is_optimizer(x: Any) -> bool:
    """Whether x has parameter groups, as torch's optimizers have, or wraps an object that has."""
    return isinstance(attribute_of(x, "param_groups"), Sequence) or bool(_inner(x))


def layers(optimizer: Any) -> list[Any]:
    """Returns the optimizer and all optimizers that it wraps, the outermost first, each once."""
    found: list[Any] = []
    waiting = [optimizer]
    while waiting:
        one = waiting.pop(0)
        if not any(one is known for known in found):
            found.append(one)
            waiting += _inner(one)
    return found


def stepped(all_layers: Sequence[Any]) -> list[Any]:
    """Returns the layers that wrap no other optimizer: these do the step."""
    return [layer for layer in all_layers if not _inner(layer) and groups_of(layer)]


def _inner(x: Any) -> list[Any]:
    """Returns the optimizers that x wraps directly."""
    found: list[Any] = []
    for attribute in _INNER:
        value = attribute_of(x, attribute)
        for one in value if isinstance(value, list | tuple) else [value]:
            if one is not None and one is not x and isinstance(attribute_of(one, "param_groups"), Sequence):
                found.append(one)
    return found


def attribute_of(x: Any, name: str) -> Any:
    """Returns an attribute; None if there is none, or if reading it raises, as a foreign class's property may."""
    try:
        return getattr(x, name, None)
    except Exception:
        return None


def groups_of(optimizer: Any) -> list[dict[str, Any]]:
    """Returns the optimizer's parameter groups that are dicts with a list of parameters."""
    groups = attribute_of(optimizer, "param_groups")
    return [
        group for group in groups or () if isinstance(group, dict) and isinstance(group.get("params"), list | tuple)
    ]


def state_of(optimizer: Any, p: Tensor) -> Mapping[str, Any]:
    """Returns the parameter's state; empty if there is none. Creates no entry, as `optimizer.state[p]` would."""
    stored = attribute_of(optimizer, "stored_state")
    if callable(stored):  # our optimizers: finds a state wherever it is stored
        ours: Any = stored(p)
        return ours
    state = attribute_of(optimizer, "state")
    entry = dict.get(state, p) if isinstance(state, dict) else None
    return entry if isinstance(entry, Mapping) else {}


def params_of(optimizer: Any) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """Yields the optimizer's parameters, each with its group."""
    for group in groups_of(optimizer):
        for p in group["params"]:
            if isinstance(p, Tensor):
                yield group, p


def class_name(optimizer: Any) -> str:
    return type(optimizer).__name__
