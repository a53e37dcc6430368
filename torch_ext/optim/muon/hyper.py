"""The hyper-parameters of Muon's groups: torch.optim.Muon's for matrices, AdamW's for all other parameters."""

import ctypes
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from torch_ext.native import library, structs
from torch_ext.params import hyper_parameters
from torch_ext.params.hyper_parameters import Group, is_number, items, refuse_text
from torch_ext.policy.policy import Policy

ALGORITHMS = (None, "muon", "adamw")
ADJUST_LR_FNS = (None, "original", "match_rms_adamw")
ITERATIONS = ("standard", "gram", "auto")  # in the order of tx_muon_ns
NS_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

OF_MATRICES = (
    *("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn"),
    *("ns", "ns_dtype"),
)
"""The keys of a group that the step of a matrix reads; all but `ns` and `ns_dtype` are torch.optim.Muon's arguments."""

_ADAMW = ("lr", "betas", "eps", "weight_decay")
_UNSUPPORTED = ("foreach", "fused", "amsgrad", "maximize", "capturable", "differentiable")


@structs.mirror("tx_muon_group")
class _MuonGroup(library.Struct):
    pass


@functools.cache
def _check_group() -> Callable[[Any, bytes], None]:
    return library.function("tx_muon_check_group", ctypes.c_void_p, ctypes.c_char_p, keep_gil=True)


def refuse(group: Group, where: str) -> None:
    """Raises TypeError or ValueError for illegal hyper-parameters of a group, as `hyper_parameters.refuse` does."""
    _refuse_kinds(group, where)
    numbers = (float(group[key]) for key in ("lr", "weight_decay", "momentum"))
    coefficients = map(float, items(group["ns_coefficients"]) or ())
    checked = _MuonGroup(*numbers, *coefficients, float(group["eps"]), int(group["ns_steps"]))
    _check_group()(ctypes.byref(checked), where.encode())
    hyper_parameters.refuse(as_adamw(group), f"{where}AdamW's ")


def _refuse_kinds(group: Group, where: str) -> None:
    for key in _UNSUPPORTED:
        if group.get(key):
            raise ValueError(f"{where}{key}={group[key]!r} is not Muon's: leave it out; the step is always fused")
    for key, legal in (
        ("algorithm", ALGORITHMS),
        ("adjust_lr_fn", ADJUST_LR_FNS),
        ("ns", ITERATIONS),
        ("ns_dtype", (None, *NS_DTYPES)),
    ):
        if group[key] not in legal:
            raise ValueError(f"{where}{key} is {group[key]!r}; {', '.join(map(repr, legal))} are legal")
    if isinstance(group["lr"], Tensor) and group["lr"].numel() != 1:
        raise ValueError(f"{where}lr is a tensor of {group['lr'].numel()} elements; one is legal")
    for key in ("lr", "weight_decay", "momentum", "eps", "adamw_lr_ratio"):
        if not is_number(group[key]):
            raise TypeError(f"{where}{key} is {group[key]!r}; a finite number >= 0 is legal")
    coefficients = items(group["ns_coefficients"])
    if coefficients is None or len(coefficients) != 3 or not all(map(is_number, coefficients)):
        raise ValueError(f"{where}ns_coefficients is {group['ns_coefficients']!r}; three numbers are legal")
    if isinstance(group["ns_steps"], bool) or not hasattr(type(group["ns_steps"]), "__index__"):
        raise TypeError(f"{where}ns_steps is {group['ns_steps']!r}; a whole number in [1, 100) is legal")
    refuse_text(group["nesterov"], f"{where}nesterov")


def as_adamw(group: Group) -> Group:
    """Returns the group's hyper-parameters for AdamW, for the parameters that Muon does not update. `betas` wins over
    `adamw_betas`: it is there only if it was set after the group was created."""
    lr, ratio, decay, eps = (group[key] for key in ("lr", "adamw_lr_ratio", "adamw_weight_decay", "adamw_eps"))
    return {
        "lr": lr if ratio == 1.0 else lr * ratio,
        "betas": group["betas"] if "betas" in group else group["adamw_betas"],
        "eps": group["eps"] if eps is None else eps,
        "weight_decay": group["weight_decay"] if decay is None else decay,
        "amsgrad": False,
        "differentiable": False,
        "maximize": False,
        "decoupled_weight_decay": True,
        "seed": group["seed"],
        "moment_rounding": group["moment_rounding"],
        "weight_rounding": group["weight_rounding"],
    }


def refuse_another_algorithm(group: Group, where: str) -> None:
    """Raises ValueError if `algorithm` was changed after the group's parameters were assigned to Muon or AdamW."""
    algorithm, forms = group["algorithm"], list(zip(group["params"], group.get("matrices") or (), strict=False))
    of_adamw = [p for p, form in forms if form is None and p.numel()]
    if algorithm == "adamw" and any(form is not None for _, form in forms) or algorithm == "muon" and of_adamw:
        raise ValueError(
            f"{where}algorithm was changed to {algorithm!r}, but parameters keep the algorithm that their group had "
            "when it was added: make a new optimizer, or restore the old value"
        )


def dtype_name(ns_dtype: Any) -> str | None:
    """Returns `ns_dtype` as groups store it: a name, or None. Raises ValueError unless it is fp32, bf16 or None."""
    for name, dtype in NS_DTYPES.items():
        if ns_dtype is dtype or ns_dtype == name:
            return name
    if ns_dtype is None:
        return None
    raise ValueError(f"ns_dtype is {ns_dtype!r}; None, torch.float32 and torch.bfloat16 are legal")


def adamw_defaults(given: Mapping[str, Any] | None, lr: Any, policy: Policy) -> dict[str, Any]:
    """Returns the argument `adamw` as keys of a group. betas and eps that it lacks come from the policy or torch's
    defaults; lr and weight_decay that it lacks are Muon's. lr: Muon's, to which AdamW's lr keeps its ratio."""
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(f"adamw is a {type(given).__name__}; a mapping of {', '.join(_ADAMW)} is legal")
    given = dict(given or {})
    if unknown := [key for key in given if key not in _ADAMW]:
        raise ValueError(f"adamw has {unknown[0]!r}; {', '.join(_ADAMW)} are legal")
    ratio = 1.0
    if "lr" in given:
        if not (is_number(given["lr"]) and is_number(lr) and float(lr) > 0 and float(given["lr"]) >= 0):
            raise ValueError(
                f"adamw has lr {given['lr']!r}, and Muon has lr {lr!r}: schedulers keep the ratio of the two, so a "
                "number >= 0 with an lr > 0 is legal. For an independent lr make a group with algorithm='adamw'"
            )
        ratio = float(given["lr"]) / float(lr)
    return {
        "adamw_betas": hyper_parameters.start_betas(given.get("betas", hyper_parameters.BETAS), policy),
        "adamw_eps": hyper_parameters.start(given.get("eps", hyper_parameters.EPS), policy, "adam_eps"),
        "adamw_lr_ratio": ratio,
        "adamw_weight_decay": given.get("weight_decay"),
    }


def own_group(group: Group, defaults: Group) -> Group:
    """Returns a copy of a user's group with its AdamW settings under the group's internal keys. The lr, betas, eps and
    weight_decay of a group with algorithm='adamw' are AdamW's."""
    if not isinstance(group, dict):
        return group  # torch says what is wrong
    group = dict(group)
    if not group.get("decoupled_weight_decay", True):
        raise ValueError("decoupled_weight_decay is False in a group: Muon decouples it; leave it out")
    if "ns_dtype" in group:
        group["ns_dtype"] = dtype_name(group["ns_dtype"])
    if "betas" in group:  # under another key: schedulers that cycle momentum would cycle `betas`
        group["adamw_betas"] = group.pop("betas")
    if group.get("algorithm") == "adamw":
        group.setdefault("eps", defaults["adamw_eps"])
        group["adamw_eps"] = None  # None: AdamW uses the group's eps
        if "lr" in group:
            group.setdefault("adamw_lr_ratio", 1.0)
        if "weight_decay" in group:
            group.setdefault("adamw_weight_decay", None)
    return group
