"""Parameter groups: what may stand in them, and as the operator's table of hyper-parameters."""

import ctypes
import functools
import math
import operator
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from torch_ext import _dtypes, _header, _library, _tensors
from torch_ext._policy import Policy, load_policy

Params: TypeAlias = Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]
Group: TypeAlias = dict[str, Any]

ROUNDINGS = {"nearest": _header.NEAREST, "dithered": _header.DITHERED, "stochastic": _header.STOCHASTIC}
# One value for all groups: the operator takes one of each per call.
SHARED = ("seed", "moment_rounding", "weight_rounding")
_WRAPPERS = re.compile(r"(?:(?<=\.)|^)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


class Hyper(NamedTuple):
    """The hyper-parameters of a call to adamw_."""

    groups: Tensor  # float64 [groups, 7], rows of tx_adamw_group
    lrs: list[Tensor]  # one per group where an lr is a tensor, else empty
    shared: tuple[int, int, int]  # seed, moment_rounding, weight_rounding


def everyone(groups: list[Group]) -> list[Tensor]:
    return [p for group in groups for p in group["params"]]


def names(groups: list[Group]) -> list[str]:
    """For messages: the parameters' names where they are known, else where they stand."""
    found: list[str] = []
    for g, group in enumerate(groups):
        if known := group.get("param_names"):
            found += map(repr, known)
        else:
            found += (f"parameter {i} of group {g}" for i in range(len(group["params"])))
    return found


def keys(groups: list[Group]) -> list[str | int]:
    """By which parameters are found in what is handed out: their names where they are known, else their positions."""
    known = [name for group in groups for name in group.get("param_names") or [None] * len(group["params"])]
    return [position if name is None else name for position, name in enumerate(known)]


def ids(groups: list[Group]) -> list[int]:
    """What seeds each parameter's rounding thresholds: its name, or its place, as the group's "param_id" says."""
    found: list[int] = []
    for group in groups:
        if group["param_id"] == "name":
            found += ids_of(group["param_names"])
        else:
            found += range(len(found), len(found) + len(group["params"]))
    return found


def ids_of(names: Iterable[str]) -> list[int]:
    """What seeds the rounding thresholds of parameters whose names are known."""
    return [_param_id()(_dtypes.c_text(logical_name(name))) for name in names]


@functools.cache
def _param_id() -> Callable[[bytes], int]:
    return _library.function("tx_param_id", ctypes.c_char_p, restype=ctypes.c_int64)


def logical_name(name: str) -> str:
    """Without what wrappers (torch.compile, DistributedDataParallel, ...) put in front: same name, same bits."""
    return _WRAPPERS.sub("", name.removeprefix("module."))


def fill(group: Group, defaults: dict[str, Any], decoupled: bool | None) -> None:
    """Adds the keys that a group of another optimizer, or of another torch, lacks."""
    for key, default in defaults.items():
        group.setdefault(key, default)
    # "name" or "position". Saved, so that a run that resumes under other circumstances rounds as it did.
    group.setdefault("param_id", "name" if "param_names" in group else "position")
    if group["param_id"] == "name" and "param_names" not in group:
        warnings.warn(
            "torch_ext: the loaded state was rounded by parameter names, which this optimizer does not know: it "
            "rounds by "
            "position from now on. Make it from model.named_parameters() to go on as before",
            stacklevel=2,
        )
        group["param_id"] = "position"
    if decoupled is not None:
        group["decoupled_weight_decay"] = decoupled


def policy_of(params: Any) -> Policy:
    """The policy of the dtype of most trainable elements."""
    groups = [p["params"] if isinstance(p, dict) else [p] for p in params] if not isinstance(params, Tensor) else []
    each = chain.from_iterable([g] if isinstance(g, Tensor) else g for g in groups)
    elements: Counter[torch.dtype] = Counter()
    for p in (p[1] if isinstance(p, tuple) else p for p in each):
        if isinstance(p, Tensor) and p.requires_grad and p.dtype in _tensors.TRAINED:
            elements[p.dtype] += max(p.numel(), 1)
    return load_policy(elements.most_common(1)[0][0] if elements else torch.float32)


def refuse(group: Group, where: str, waits: bool = True) -> None:
    """Raises for hyper-parameters that no group may have. waits: for a GPU, to read an lr that is there."""
    if group["amsgrad"]:
        raise ValueError(
            f"{where}amsgrad=True is not supported: leave it out (the default of torch too), or use torch.optim.AdamW"
        )
    if group["differentiable"]:
        raise ValueError(
            f"{where}differentiable=True is not supported: the step is one fused operator without a derivative; use "
            "torch.optim.AdamW for a step that autograd sees"
        )
    lr, betas = group["lr"], group["betas"]
    if isinstance(lr, Tensor) and (lr.numel() != 1 or lr.dtype not in (torch.float32, torch.float64)):
        raise ValueError(
            f"{where}lr is a tensor of {lr.numel()} elements in {lr.dtype}; one float32 or float64 is legal"
        )
    if len(betas) != 2:
        raise ValueError(f"{where}betas has {len(betas)} values; 2 are legal")
    for key, value in (("lr", lr), ("eps", group["eps"]), ("weight_decay", group["weight_decay"])):
        if (waits or not _is_away(value)) and not 0 <= float(value) < math.inf:
            raise ValueError(f"{where}{key} is {float(value)}; a finite number >= 0 is legal")
    for i, beta in enumerate(betas):
        if not 0 <= float(beta) < 1:
            raise ValueError(f"{where}betas[{i}] is {float(beta)}; a number in [0, 1) is legal")
    for key in ("moment_rounding", "weight_rounding"):
        if group[key] not in ROUNDINGS:
            raise ValueError(f"{where}{key} is {group[key]!r}; {', '.join(ROUNDINGS)} are legal")
    if not -(2**63) <= operator.index(group["seed"]) < 2**63:
        raise ValueError(f"{where}seed is {group['seed']}; an integer of 64 bits is legal")


def refuse_differing(group: Group, first: Group, where: str) -> None:
    """Raises where a group wants another value than the first for what is one value per optimizer."""
    for key in SHARED:
        if group[key] != first[key]:
            raise ValueError(
                f"{where}{key} is {group[key]!r} and in group 0 it is {first[key]!r}; it is one per optimizer: make "
                "a second one"
            )


def _is_away(value: Any) -> bool:
    """A tensor whose value the host would have to wait for."""
    return isinstance(value, Tensor) and value.device.type != "cpu"


def _is_handed_over(lr: Any, device: torch.device) -> bool:
    """Whether the operator gets the tensor: one on the CPU is read, which waits for nothing, where parameters are
    not."""
    return isinstance(lr, Tensor) and (device.type == "cpu" or _is_away(lr))


def key_of(groups: list[Group], device: torch.device) -> list[Any]:
    """Equal keys mean equal tables for parameters on the device. An lr that is handed over counts by its address: the
    table shares its memory. Other tensors on a GPU count by address and version: reading them would wait for it."""
    key: list[Any] = []
    for g in groups:
        lr = g["lr"]
        key += (
            lr if type(lr) is float else lr.data_ptr() if _is_handed_over(lr, device) else float(lr),
            *((b.data_ptr(), b._version) if _is_away(b) else float(b) for b in g["betas"]),
            g["eps"],
            g["weight_decay"],
            g["maximize"],
            g["decoupled_weight_decay"],
            g["amsgrad"],
            g["differentiable"],
            g["seed"],
            g["moment_rounding"],
            g["weight_rounding"],
        )
    return key


def hyper(groups: list[Group], device: torch.device) -> Hyper:
    """The table, for parameters on the device. Raises ValueError, naming the group, for values that are not legal; an
    lr on a GPU is not read."""
    rows = []
    for i, g in enumerate(groups):
        refuse(g, f"group {i}: ", waits=False)
        refuse_differing(g, groups[0], f"group {i}: ")
        lr = 0.0 if _is_handed_over(g["lr"], device) else g["lr"]  # lrs stand for it
        row = (lr, *g["betas"], g["eps"], g["weight_decay"], g["maximize"], g["decoupled_weight_decay"])
        rows.append([float(x) for x in row])
    lrs: list[Tensor] = []
    if any(_is_handed_over(g["lr"], device) for g in groups):
        lrs = [
            g["lr"].detach()
            if _is_handed_over(g["lr"], device)
            else torch.full((), float(g["lr"]), dtype=torch.float64, device=device)
            for g in groups
        ]
    first = groups[0]
    shared = (first["seed"], ROUNDINGS[first["moment_rounding"]], ROUNDINGS[first["weight_rounding"]])
    return Hyper(torch.tensor(rows, dtype=torch.float64), lrs, shared)
