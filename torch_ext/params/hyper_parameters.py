"""The hyper-parameters of a parameter group: their defaults, and checks of their values."""

import ctypes
import functools
import numbers
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from torch_ext.native import constants, library
from torch_ext.policy.policy import Policy

Group: TypeAlias = dict[str, Any]

ROUNDINGS = {"nearest": constants.NEAREST, "dithered": constants.DITHERED, "stochastic": constants.STOCHASTIC}
# These have one value for all groups: the operator takes one of each per call.
SHARED = ("seed", "moment_rounding", "weight_rounding")
ONE_PER_OPTIMIZER = (
    *("policy", "states", "min_8bit_size", "skip_nonfinite", "on_external_write", "offload_fraction"),
    *("step_in_backward", "ema_decay", "ema_dtype", "ema_every", "adamw", "split"),
)
"""Arguments of the constructor that are illegal in a group. So is `adamw_params`, which may be modules."""
_GROUP_HINTS = dict.fromkeys(
    ("adamw", "adamw_params"), "; a group with algorithm='adamw' has its own lr, betas, eps and weight_decay"
)
_FLAGS = ("amsgrad", "differentiable", "maximize", "decoupled_weight_decay", "foreach", "capturable", "fused")


# torch's defaults, for signatures. Each is a float object of its own and recognised by identity: an equal number that a
# caller passes counts as given. (A subclass of float would confuse introspection and YAML.)
LR, BETAS, EPS = float("1e-3"), (float("0.9"), float("0.999")), float("1e-8")
NO_DECAY, DECAY, MUON_DECAY = float("0"), float("1e-2"), float("0.1")
_DEFAULTS = (LR, *BETAS, EPS, NO_DECAY, DECAY, MUON_DECAY)


def start(given: Any, policy: Policy, key: str) -> Any:
    """Returns a hyper-parameter's initial value: the argument if one was given, else the policy's explicit value for
    `key`, else torch's default."""
    if not any(given is default for default in _DEFAULTS):
        return given
    explicit = policy._explicit(key)
    # A new float object: if the group's value is passed to another optimizer's constructor, it counts as given there.
    return float(repr(given)) if explicit is None else explicit


def start_betas(given: Any, policy: Policy) -> Any:
    """Returns `start` of both betas as a tuple, torch's form. Anything but a pair is returned as it is; `refuse` raises
    for it."""
    pair = items(given)
    if pair is None or len(pair) != 2:
        return given
    return tuple(start(beta, policy, key) for beta, key in zip(pair, ("adam_beta1", "adam_beta2"), strict=True))


def refuse_optimizer(policy: Policy, legal: tuple[str, ...], kind: str) -> None:
    """Raises ValueError if the policy names another optimizer. legal: the policy's names for this one. kind: this
    one, for the message."""
    name = policy._explicit("optimizer")
    if name is not None and name.strip().casefold() not in legal:
        raise ValueError(
            f"the policy's optimizer is {name!r}, and this is {kind}: {' or '.join(map(repr, legal))} is legal for "
            f"it; leave 'optimizer' out of the policy, or make the optimizer that it names"
        )


def refuse_keys(group: Group, where: str, given: Mapping[str, Any]) -> None:
    """Raises ValueError for constructor arguments in a group, where they would be ignored. given: the constructor's
    arguments; the same values are legal, since an optimizer that wraps this one (SAM, say) copies them into groups."""
    for key in (*ONE_PER_OPTIMIZER, "adamw_params"):
        if key in group and not (key in given and (group[key] is given[key] or group[key] == given[key])):
            raise ValueError(
                f"{where}{key!r} is one per optimizer, not per group: pass {key}= to the constructor, and make a "
                f"second optimizer for parameters that need another{_GROUP_HINTS.get(key, '')}"
            )


# -- what is legal ------------------------------------------------------------------------------------------------


def refuse(group: Group, where: str) -> None:
    """Raises for illegal hyper-parameters of a group: TypeError for values that are no numbers (text from a
    configuration file, say), ValueError for all others."""
    refuse_kinds(group, where)
    check_rows()((ctypes.c_double * 7)(*row_of(group)), 1, where.encode())


@functools.cache
def check_rows() -> Callable[[Any, int, bytes | None], None]:
    """Returns tx_adamw_check_groups, which raises ValueError for rows of `row_of` with illegal numbers."""
    return library.function("tx_adamw_check_groups", ctypes.c_void_p, ctypes.c_int64, ctypes.c_char_p, keep_gil=True)


def row_of(group: Group, waits: bool = True) -> list[float]:
    """Returns the group's numbers in the order of tx_adamw_group. waits: read an lr that is a GPU tensor, which waits
    for the GPU; else 0 stands for it."""
    lr = group["lr"] if waits or not is_on_device(group["lr"]) else 0.0
    flags = bool(group["maximize"]), bool(group.get("decoupled_weight_decay"))
    return [float(x) for x in (lr, *group["betas"], group["eps"], group["weight_decay"], *flags)]


def refuse_kinds(group: Group, where: str) -> None:
    """Raises like `refuse`, but does not check the ranges of numbers, which C does (`check_rows`)."""
    _refuse_flags(group, where)
    lr = group["lr"]
    if isinstance(lr, Tensor) and (lr.numel() != 1 or lr.dtype not in (torch.float32, torch.float64)):
        raise ValueError(
            f"{where}lr is a tensor of {lr.numel()} elements in {lr.dtype}; one float32 or float64 is legal"
        )
    for key in ("lr", "eps", "weight_decay"):
        if not is_number(group[key]):
            raise _no_number(group[key], where + key, "a finite number >= 0 is legal")
    _refuse_betas(group["betas"], where)
    if group.get("fused") and group.get("foreach"):
        raise ValueError(
            f"{where}fused=True and foreach=True exclude each other (in torch.optim, too): the step is always fused; "
            "leave out both"
        )
    for key in ("moment_rounding", "weight_rounding"):
        if group[key] not in ROUNDINGS:
            raise ValueError(f"{where}{key} is {group[key]!r}; {', '.join(ROUNDINGS)} are legal")
    if not hasattr(type(group["seed"]), "__index__"):
        raise TypeError(f"{where}seed is {_shown(group['seed'])}; an integer of 64 bits is legal")
    if not -(2**63) <= operator.index(group["seed"]) < 2**63:
        raise ValueError(f"{where}seed is {group['seed']}; an integer of 64 bits is legal")


def _refuse_flags(group: Group, where: str) -> None:
    for key in _FLAGS:
        refuse_text(group.get(key), where + key)
    if group["amsgrad"]:
        raise ValueError(
            f"{where}amsgrad=True is not supported: leave it out (the default of torch too), or use torch.optim.AdamW"
        )
    if group["differentiable"]:
        raise ValueError(
            f"{where}differentiable=True is not supported: leave it out, or use torch.optim.AdamW for a step that "
            "autograd sees; this one is a fused operator without a derivative"
        )


def refuse_text(flag: Any, what: str) -> None:
    """Raises TypeError for a flag that is text: "False" would count as true."""
    if isinstance(flag, str | bytes):
        raise TypeError(f"{what} is {_shown(flag)}; True or False is legal")


def _refuse_betas(betas: Any, where: str) -> None:
    pair = items(betas)
    if pair is None:
        raise TypeError(f"{where}betas is {_shown(betas)}; two numbers in [0, 1) are legal: (0.9, 0.999), say")
    if len(pair) != 2:
        raise ValueError(f"{where}betas has {len(pair)} values; 2 are legal")
    for i, beta in enumerate(pair):
        if isinstance(beta, bool):  # as torch does
            raise TypeError(f"{where}betas[{i}] is {beta}; a number in [0, 1) is legal")
        if not is_number(beta):
            raise _no_number(beta, f"{where}betas[{i}]", "a number in [0, 1) is legal")


def _no_number(value: Any, what: str, legal: str) -> Exception:
    if isinstance(value, Tensor):
        return ValueError(f"{what} is a tensor of {value.numel()} elements in {value.dtype}; {legal}")
    return TypeError(f"{what} is {_shown(value)}; {legal}{_hint(value)}")


def _shown(value: Any) -> str:
    kind = "text" if isinstance(value, str | bytes | bytearray) else f"a {type(value).__name__}"
    return "None" if value is None else f"{value!r}, {kind}"


def _hint(value: Any) -> str:
    """Returns a hint for a number that came as text: from YAML's `1e-5`, or an unconverted environment variable."""
    if not isinstance(value, str):
        return ""
    try:
        return f": {float(value)!r}, not in quotes (YAML takes 1e-5 for text, and 1.0e-5 for a number)"
    except ValueError:
        return ""


def is_number(value: Any) -> bool:
    """Whether the value is one real number. Text is not, although float() could parse it."""
    if isinstance(value, float | int):
        return True
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    kind = getattr(getattr(value, "dtype", None), "kind", None)  # numpy's
    if kind is not None:
        return kind in "biuf" and getattr(value, "ndim", 0) == 0
    if isinstance(value, numbers.Complex) and not isinstance(value, numbers.Real):
        return False
    return hasattr(type(value), "__float__") or hasattr(type(value), "__index__")


def items(betas: Any) -> tuple[Any, ...] | None:
    """Returns the values of betas as a tuple; None if betas is no sequence."""
    if isinstance(betas, tuple | list):
        return tuple(betas)
    if isinstance(betas, str | bytes | Mapping | set | frozenset) or not isinstance(betas, Iterable):
        return None
    return tuple(betas) if hasattr(betas, "__len__") and getattr(betas, "ndim", 1) == 1 else None


def refuse_differing(group: Group, first: Group, where: str) -> None:
    """Raises ValueError if a group differs from the first one in a hyper-parameter that all groups share (SHARED)."""
    for key in SHARED:
        if group[key] != first[key]:
            raise ValueError(
                f"{where}{key} is {group[key]!r} and in group 0 it is {first[key]!r}; it is one per optimizer: make "
                "a second one"
            )


def is_on_device(value: Any) -> bool:
    """Whether this is a tensor on a device: reading its value would make the host wait."""
    return isinstance(value, Tensor) and value.device.type != "cpu"
