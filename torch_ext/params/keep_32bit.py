"""`keep_32bit`: selects the parameters that keep fp32 moments, by name, by module or by type of module."""

import fnmatch
import gc
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from torch_ext.params.param_groups import logical_name

Kept: TypeAlias = str | nn.Module | type[nn.Module]
"""A name or a pattern of names, a module, or a type of modules."""

_LEGAL = (
    "names of parameters or modules (patterns with *, ? and [] among them), modules, and types of modules such as "
    "torch.nn.Embedding are legal"
)


class Selection:
    """The value of the argument `keep_32bit`. Modules are held weakly: a deleted one selects nothing any more, and a
    pickle contains none."""

    def __init__(self, given: Kept | Iterable[Kept], where: str) -> None:
        """where: the argument's name, for messages. Raises TypeError for items that are neither names nor modules nor
        types of modules."""
        self._where = where
        self._patterns: list[str] = []
        self._types: list[type[nn.Module]] = []
        self._modules: list[weakref.ref[nn.Module]] = []
        for item in _items(given, where):
            if isinstance(item, str):
                self._patterns.append(item)
            elif isinstance(item, nn.Module):
                self._modules.append(weakref.ref(item))
            elif isinstance(item, type) and issubclass(item, nn.Module):
                self._types.append(item)
            else:
                raise TypeError(f"{where} has {_shown(item)}; {_LEGAL}")

    def __bool__(self) -> bool:
        return bool(self._patterns or self._types or self._modules)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_modules": []}

    def flags(self, params: Sequence[Tensor], names: Sequence[str | None], complete: bool) -> list[bool]:
        """Returns for each parameter whether it is selected. names: None for an unknown name. complete: `params` are
        all parameters; raises ValueError for an item that selects none of them, and for a name if names are unknown."""
        logical = [None if name is None else logical_name(name) for name in names]
        if self._patterns and complete and None in logical:
            raise ValueError(
                f"{self._where} has the name {self._patterns[0]!r}, and the names of the parameters are not known: "
                "pass model.named_parameters() as params"
            )
        found = [False] * len(params)
        selected: list[tuple[str, list[bool]]] = [
            (repr(pattern), [name is not None and _matches(name, pattern) for name in logical])
            for pattern in self._patterns
        ]
        for module in filter(None, (known() for known in self._modules)):
            selected.append((f"a {type(module).__name__}", _in_modules([module], params)))
        selected += ((f"the type {kind.__name__}", _in_modules(_living_modules(kind), params)) for kind in self._types)
        for what, flags in selected:
            if complete and not any(flags):
                raise ValueError(
                    f"{self._where} has {what}, which selects none of the parameters{_first_names(logical)}"
                )
            found = [a or b for a, b in zip(found, flags, strict=True)]
        return found


def _items(given: Any, where: str) -> list[Any]:
    if isinstance(given, str | nn.Module | type):
        return [given]
    if isinstance(given, Mapping | Tensor | bool) or not isinstance(given, Iterable):
        raise TypeError(f"{where} is {_shown(given)}; {_LEGAL}")
    return list(given)


def _matches(name: str, pattern: str) -> bool:
    """Whether the pattern matches the parameter's name, or the name of a module that contains the parameter."""
    parts = name.split(".")
    return any(fnmatch.fnmatchcase(".".join(parts[:n]), pattern) for n in range(1, len(parts) + 1))


def _in_modules(modules: Iterable[nn.Module], params: Sequence[Tensor]) -> list[bool]:
    held = {id(p) for module in modules for p in module.parameters()}
    return [id(p) in held for p in params]


def _living_modules(kind: type[nn.Module]) -> Iterator[nn.Module]:
    """Returns all living modules of a type. A search of the heap, since a parameter does not know its module."""
    return (module for module in gc.get_objects() if issubclass(type(module), kind))


def _first_names(names: Sequence[str | None]) -> str:
    known = [name for name in names if name is not None]
    if not known:
        return ""
    more = f" and {len(known) - 4} more" if len(known) > 4 else ""
    return f" ({', '.join(known[:4])}{more}); a part of a name is a pattern, '*norm*'"


def _shown(item: Any) -> str:
    if isinstance(item, torch.Tensor):
        return "a tensor"
    return f"{item!r}, a {type(item).__name__}"


# -- groups -------------------------------------------------------------------------------------------------------


def fill(group: dict[str, Any], selection: Selection | None, where: str) -> None:
    """Sets group["keep_32bit"] to one bool per parameter; leaves it out if all are False. The group's own entry (a
    bool, or whatever the argument may be) takes precedence over the selection."""
    params, own = group["params"], group.pop("keep_32bit", None)
    names = group.get("param_names") or [None] * len(params)
    if own is None:
        flags = selection.flags(params, names, complete=False) if selection else []
    elif isinstance(own, bool):
        flags = [own] * len(params)
    elif _is_flags(own):
        flags = list(own)
    else:
        flags = Selection(own, f"{where}keep_32bit").flags(params, names, complete=True)
    if any(flags):
        group["keep_32bit"] = flags


def _is_flags(own: Any) -> bool:
    """Whether the entry is a list of bools, as in a group that comes from another torch_ext optimizer."""
    return isinstance(own, list) and len(own) > 0 and all(isinstance(flag, bool) for flag in own)


def refuse_unused(selection: Selection, groups: Iterable[dict[str, Any]]) -> None:
    """Raises ValueError for an item of the argument that selects none of the parameters."""
    groups = list(groups)
    params = [p for group in groups for p in group["params"]]
    names = [name for group in groups for name in group.get("param_names") or [None] * len(group["params"])]
    selection.flags(params, names, complete=True)


_OWN = ("keep_32bit", "matrices")
"""Keys of a group with one entry per parameter that belong to this optimizer and are never saved, like the policy."""


def without_own_keys(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns copies of the groups without the keys in _OWN, for a state_dict."""
    return [{key: value for key, value in group.items() if key not in _OWN} for group in groups]


def with_own_keys(saved: Iterable[Mapping[str, Any]], own: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns saved groups with this optimizer's own values of the keys in _OWN."""
    return [
        group | {key: mine[key] for key in _OWN if key in mine}
        for group, mine in zip(without_own_keys(saved), own, strict=True)
    ]
