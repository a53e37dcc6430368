"""Parameter groups: checks their contents, names their parameters, builds the operator's table of hyper-parameters."""

import ctypes
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from torch_ext.native import dtypes, library, warning
from torch_ext.params.hyper_parameters import (
    ROUNDINGS,
    Group,
    check_rows,
    is_number,
    is_on_device,
    items,
    refuse_differing,
    refuse_kinds,
    row_of,
)
from torch_ext.tensors import dense

Params: TypeAlias = Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]

_WRAPPERS = re.compile(r"(?:(?<=\.)|^)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


_COLUMNS = 7  # of a table; the first one is the lr


class HyperparameterTable(NamedTuple):
    """The hyper-parameters of a call to adamw_."""

    groups: Tensor  # float64 [groups, 7], rows of tx_adamw_group
    lrs: list[Tensor]  # one per group if any lr is a tensor, else empty
    shared: tuple[int, int, int]  # seed, moment_rounding, weight_rounding


def all_params(groups: list[Group]) -> list[Tensor]:
    if len(groups) == 1:  # takes an eighth of the time
        return list(groups[0]["params"])
    return list(chain.from_iterable(map(itemgetter("params"), groups)))


def names(groups: list[Group]) -> list[str]:
    """Returns the parameters' names for messages; of unnamed ones, position and group."""
    found: list[str] = []
    for g, group in enumerate(groups):
        if known := group.get("param_names"):
            found += map(repr, known)
        else:
            found += (f"parameter {i} of group {g}" for i in range(len(group["params"])))
    return found


def keys(groups: list[Group]) -> list[str | int]:
    """Returns the parameters' keys in dicts for users: the name if it is known, else the position."""
    known = [name for group in groups for name in group.get("param_names") or [None] * len(group["params"])]
    return [position if name is None else name for position, name in enumerate(known)]


def ids(groups: list[Group]) -> list[int]:
    """Returns the ids that seed the parameters' rounding thresholds: a hash of the name, or the position, as the
    group's "param_id" says."""
    found: list[int] = []
    for group in groups:
        if group["param_id"] == "name":
            found += ids_of(group["param_names"])
        else:
            found += range(len(found), len(found) + len(group["params"]))
    return found


def ids_of(names: Iterable[str]) -> list[int]:
    """Returns the ids that seed the rounding thresholds of parameters with these names."""
    param_id = library.function("tx_param_id", ctypes.c_char_p, restype=ctypes.c_int64)
    return [param_id(dtypes.c_text(logical_name(name))) for name in names]


def kept_32bit(groups: list[Group]) -> list[bool]:
    """Returns for each parameter whether its moments are kept in fp32 (`keep_32bit`). Raises ValueError if a group's
    parameters were changed and its list of flags was not."""
    return _per_param(groups, "keep_32bit", False)


def are_matrices(groups: list[Group]) -> list[bool]:
    """Returns for each parameter whether Muon updates it (optim/muon/matrix_forms.py). Raises ValueError as
    `kept_32bit` does."""
    return [form is not None for form in _per_param(groups, "matrices", None)]


def _per_param(groups: list[Group], key: str, absent: Any) -> list[Any]:
    """Returns the entries of the groups' lists `key`, one per parameter; `absent` for a group without the list."""
    found: list[Any] = []
    for g, group in enumerate(groups):
        n = len(group["params"])
        values = group.get(key) or [absent] * n
        if len(values) != n:
            raise ValueError(
                f"group {g} has {n} parameters, and its {key!r} has {len(values)} entries: change both lists together"
            )
        found += values
    return found


def logical_name(name: str) -> str:
    """Returns the name without prefixes of wrappers (torch.compile, DistributedDataParallel, ...), so that a wrapped
    model is rounded with the same bits."""
    return _WRAPPERS.sub("", name.removeprefix("module."))


def fill(group: Group, defaults: dict[str, Any], decoupled: bool | None) -> None:
    """Adds the keys that a group from another optimizer, or another version of torch, lacks."""
    for key, default in defaults.items():
        group.setdefault(key, default)
    # "name" or "position". Saved, so that a resumed run rounds with the same ids, whether or not it is given names.
    group.setdefault("param_id", "name" if "param_names" in group else "position")
    if group["param_id"] == "name" and "param_names" not in group:
        warning.warn(
            "the loaded state was rounded with thresholds that depend on parameter names, which this optimizer does "
            "not know: from now on they depend on positions. Make the optimizer from model.named_parameters() to "
            "keep the thresholds"
        )
        group["param_id"] = "position"
    if decoupled is not None:
        group["decoupled_weight_decay"] = decoupled


def as_lists(params: Params) -> Params:
    """Returns the parameters or groups as a list, and replaces an iterator in a group by a list. An iterator yields its
    parameters only once, and this package reads them before torch.optim.Optimizer does."""
    if isinstance(params, Tensor):
        return params  # torch says what is wrong with a single tensor
    _refuse_containers(params)
    everything: list[Any] = list(params)
    _refuse_members(everything)
    for group in everything:
        members = group.get("params") if isinstance(group, dict) else None
        if not isinstance(members, Tensor | list | tuple | set | None):  # torch refuses a set
            group["params"] = list(members)
    return everything


def _refuse_containers(params: Any) -> None:
    """Raises TypeError for objects that contain parameters but are not legal as `params`."""
    if isinstance(params, torch.nn.Module) and not isinstance(params, torch.nn.ParameterList):
        raise TypeError(
            f"params is a {type(params).__name__}, a module: pass model.named_parameters(), or model.parameters()"
        )
    if isinstance(params, Mapping) and "params" in params:
        raise TypeError("params is one group, a dict: pass a list of groups, [group]")
    if isinstance(params, Mapping):
        raise TypeError("params is a mapping: pass its items(), pairs of a name and a parameter")
    if isinstance(params, str | bytes) or not isinstance(params, Iterable):
        raise TypeError(
            f"params is a {type(params).__name__}: pass model.named_parameters(), model.parameters(), or a list of "
            "groups"
        )


def _refuse_members(everything: list[Any]) -> None:
    """Raises ValueError if params is empty, TypeError if it is a list of names or of modules."""
    if not everything:
        raise ValueError(
            "params is empty: an iterator such as model.parameters() gives its parameters once only, and a model whose "
            "parameters are all elsewhere (on another pipeline stage, say) needs no optimizer"
        )
    first = everything[0]
    if isinstance(first, str):
        raise TypeError(
            f"params is a list of names, {first!r} the first: pass the parameters, [p for name, p in "
            "model.named_parameters() if name in names], or pairs of a name and a parameter"
        )
    if isinstance(first, torch.nn.Module):
        raise TypeError(
            f"params is a list of modules, a {type(first).__name__} the first: pass their parameters, "
            '[{"params": module.parameters()} for module in modules]'
        )


def dtype_of_most(params: Params) -> torch.dtype:
    """Returns the dtype that most trainable elements have; if all are frozen, most elements. params: of `as_lists`."""
    elements: Counter[torch.dtype] = Counter()
    legal = [p for p in _tensors_in(params) if p.dtype in dense.TRAINED and not torch.nn.parameter.is_lazy(p)]
    for p in [p for p in legal if p.requires_grad] or legal:
        elements[p.dtype] += max(p.numel(), 1)
    return elements.most_common(1)[0][0] if elements else torch.float32


def _tensors_in(params: Params) -> Iterator[Tensor]:
    """Yields the parameters of all groups, and skips everything else: torch raises for that."""
    for group in [] if isinstance(params, Tensor) else params:
        members: Any = group.get("params", ()) if isinstance(group, dict) else [group]
        for p in [members] if isinstance(members, Tensor) else members or ():
            named = p[1] if isinstance(p, tuple) and len(p) == 2 else p
            if isinstance(named, Tensor):
                yield named


def _is_passed(lr: Any, device: torch.device) -> bool:
    """Whether the operator gets the lr as a tensor and reads it itself. A CPU tensor is read here instead if the
    parameters are on a GPU: reading it waits for nothing."""
    return isinstance(lr, Tensor) and (device.type == "cpu" or is_on_device(lr))


def _plain(value: Any) -> Any:
    """Returns what represents a hyper-parameter in the key of `key_of`."""
    if type(value) is float:
        return value
    if is_on_device(value):
        return value.data_ptr(), value._version
    return float(value) if is_number(value) else object()  # a new object equals nothing


# What the operator takes of a group, without its parameters.
_VALUES = itemgetter(
    "lr",
    "betas",
    "eps",
    "weight_decay",
    "maximize",
    "decoupled_weight_decay",
    "amsgrad",
    "differentiable",
    "seed",
    "moment_rounding",
    "weight_rounding",
)


def values_of(groups: list[Group]) -> Sequence[Any]:
    """Returns the objects that `key_of` makes a key of."""
    return _VALUES(groups[0]) if len(groups) == 1 else list(chain.from_iterable(map(_VALUES, groups)))


def is_immutable(value: Any) -> bool:
    """Whether a hyper-parameter stays equal to itself: a plain number or name, or a tuple of these."""
    kind = type(value)
    return all(map(is_immutable, value)) if kind is tuple else kind in (float, int, bool, str)


def key_of(groups: list[Group], device: torch.device) -> list[Any]:
    """Returns a key of the groups' hyper-parameters: equal keys mean equal tables of `hyper`.

    An lr that is passed as a tensor is represented by its address, because the table shares its memory. Other GPU
    tensors are represented by address and version counter, because reading them would wait for the GPU. A value that is
    no number is unequal to everything, so that `hyper` is called and raises."""
    key: list[Any] = []
    for lr, betas, eps, weight_decay, *others in map(_VALUES, groups):
        key += (
            lr if type(lr) is float else lr.data_ptr() if _is_passed(lr, device) else _plain(lr),
            *(_plain(b) for b in items(betas) or (betas,)),
            _plain(eps),
            _plain(weight_decay),
            *others,
        )
    return key


def hyper(groups: list[Group], device: torch.device) -> HyperparameterTable:
    """Returns the table for parameters on this device. Raises ValueError or TypeError, naming the group, for illegal
    values. An lr on a GPU is not read."""
    rows = []
    for i, g in enumerate(groups):
        refuse_kinds(g, f"group {i}: ")
        refuse_differing(g, groups[0], f"group {i}: ")
        rows.append(row_of(g, waits=False))
    table = torch.tensor(rows, dtype=torch.float64, device="cpu")
    check_rows()(table.data_ptr(), len(rows), None)
    lrs: list[Tensor] = []
    if any(_is_passed(g["lr"], device) for g in groups):
        lrs = [
            g["lr"].detach()
            if _is_passed(g["lr"], device)
            else torch.full((), float(g["lr"]), dtype=torch.float64, device=device)
            for g in groups
        ]
    first = groups[0]
    shared = (first["seed"], ROUNDINGS[first["moment_rounding"]], ROUNDINGS[first["weight_rounding"]])
    return HyperparameterTable(table, lrs, shared)


def update_lrs(table: HyperparameterTable, known: list[Any], key: list[Any], n: int) -> bool:
    """Writes other lrs into the table of n groups with the key `known`, so that its key is `key`. Schedulers change the
    lrs in every step, and `hyper` takes several times as long. Returns False, and does nothing, unless the keys differ
    only in lrs that are floats. ValueError, naming the group, for an lr that is not legal; nothing is written then."""
    fields = len(known) // n
    lrs, others = key[::fields], key.copy()
    if table.lrs or len(key) != len(known) or {float} != set(map(type, lrs + known[::fields])):
        return False
    others[::fields] = known[::fields]
    if others != known:
        return False
    address, numbers = table.groups.data_ptr(), (ctypes.c_double * (_COLUMNS * n))()
    ctypes.memmove(numbers, address, ctypes.sizeof(numbers))
    numbers[::_COLUMNS] = lrs
    check_rows()(ctypes.addressof(numbers), n, None)
    ctypes.memmove(address, numbers, ctypes.sizeof(numbers))
    return True


Method = TypeVar("Method", bound=Callable[..., Any])


def innermost(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Returns the optimizer inside a framework's wrapper (Accelerate, Lightning); an unwrapped one itself."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer


def of_the_innermost(method: Method) -> Method:
    """Decorator of a method that has to run on the innermost optimizer. Lightning's wrapper inherits the methods of our
    class, but attributes that they would set on the wrapper are not seen by the step."""

    @functools.wraps(method)
    def forwarded(self: Any, *args: Any, **options: Any) -> Any:
        return method(innermost(self), *args, **options)

    return cast(Method, forwarded)
