"""Checks of moments: whether they exist, have the parameter's shape, are finite, and fit each other."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from torch_ext.diagnosis import state_moments
from torch_ext.diagnosis.findings import Finding, finding
from torch_ext.diagnosis.state_moments import EXP_AVG, EXP_AVG_SQ, MOMENTUM
from torch_ext.diagnosis.trained_parameters import Reading, Trained
from torch_ext.optim.optimizer_base import OptimizerBase

_IMPOSSIBLE = 0.01  # share of elements that makes a finding; a few can result from betas that changed in training
_SLACK = 2.0
_LOAD = "optimizer.load_state_dict(checkpoint)  # of an optimizer with these parameters, in this order"


def check(reading: Reading) -> Iterator[Finding]:
    """Yields findings about moments that are missing, misshapen, not finite or inconsistent."""
    yield from _no_state(reading)
    yield from _missing_moments(reading)
    yield from _by_message(reading, "misshapen_moments", _misshapen, _LOAD)
    yield from _by_message(reading, "nonfinite_state", _nonfinite, _LOAD + "; from before this")
    yield from _by_message(reading, "inconsistent_moments", _inconsistent, _LOAD)


def _by_message(reading: Reading, kind: str, what: Any, fix: str) -> Iterator[Finding]:
    """Yields one finding for each distinct message that the function `what` returns for a parameter."""
    found: dict[str, dict[str, None]] = {}
    for t in reading.trained:
        said = what(t)
        if said:
            found.setdefault(said, {}).update(dict.fromkeys(t.names))
    yield from _findings(reading, kind, found, fix)


def _findings(reading: Reading, kind: str, found: dict[str, dict[str, None]], fix: str) -> Iterator[Finding]:
    for said, names in found.items():
        elements = float(sum(reading.model.named[name].numel() for name in names))
        yield finding(kind, said, list(names), fix, elements, "elements")


def has_moments(t: Trained) -> bool:
    """Whether the parameter has a state besides its step count."""
    return any(key in t.state for key in (EXP_AVG, EXP_AVG_SQ, MOMENTUM, "state1"))


def _keeps_momentum(t: Trained) -> bool:
    return t.betas() is not None or bool(t.group.get("momentum"))


def _requires_grad(t: Trained) -> bool:
    return t.root.requires_grad and (t.stepped is None or t.stepped.numel() > 0)


def _no_state(reading: Reading) -> Iterator[Finding]:
    """Yields findings about parameters without a state in groups where others have one."""
    stepped = {id(t.group) for t in reading.trained if has_moments(t) and (t.step() is None or t.step())}
    waiting: list[Trained] = []
    for t in reading.trained:
        fresh = not has_moments(t) and not t.state.get("step")
        if fresh and _requires_grad(t) and _keeps_momentum(t) and id(t.group) in stepped and _keeps_state_dict(t):
            waiting.append(t)
    for severity, chosen, said in (
        ("warning", [t for t in waiting if t.param.grad is None], "get no gradient, or a load left their state out"),
        ("note", [t for t in waiting if t.param.grad is not None], "begin with the next step, or were left out"),
    ):
        names = list(dict.fromkeys(name for t in chosen for name in t.names))
        if names:
            yield finding(
                "no_state",
                f"Parameters that require a gradient and have no state, while others of their group do: they {said}.",
                names,
                "p.requires_grad_(False)  # where they are not meant to be trained; else load their state",
                severity=severity,
            )


def _keeps_state_dict(t: Trained) -> bool:
    """Whether the optimizer keeps states in a dict `state`; otherwise a missing state may be somewhere else."""
    return isinstance(getattr(t.optimizer, "state", None), dict)


def _missing_moments(reading: Reading) -> Iterator[Finding]:
    """Yields findings about states that lack moments that Adam needs, or that other parameters of the group have."""
    kinds_in_group: dict[int, set[frozenset[str]]] = {}
    for t in reading.trained:
        kinds_in_group.setdefault(id(t.group), set()).add(_moments_of(t))
    found: dict[str, dict[str, None]] = {}
    for t in reading.trained:
        there = _moments_of(t)
        # Supersets only: a matrix may keep other moments than a vector.
        more = [other for other in kinds_in_group[id(t.group)] if there < other]
        wanted = _needed(t) | (min(more, key=len) if more else frozenset())
        absent = [key for key in state_moments.SHAPED if key in wanted and key not in there]
        if absent and _requires_grad(t) and _has_stepped(t):
            said = f"The state has steps or other moments, but no {' and no '.join(absent)}: a load left it out."
            found.setdefault(said, {}).update(dict.fromkeys(t.names))
    yield from _findings(reading, "missing_moments", found, _LOAD)


def _moments_of(t: Trained) -> frozenset[str]:
    return frozenset(key for key in state_moments.SHAPED if isinstance(t.state.get(key), Tensor))


def _has_stepped(t: Trained) -> bool:
    """Whether the parameter has been updated: it has a moment, or its own step count is above 0."""
    steps = t.state.get("step")
    return has_moments(t) or (steps is not None and float(steps) > 0)


def _needed(t: Trained) -> set[str]:
    """Returns the moments that this optimizer is known to keep for every parameter."""
    if type(t.optimizer) not in (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam):
        return {EXP_AVG, EXP_AVG_SQ} if isinstance(t.optimizer, OptimizerBase) and t.betas() is not None else set()
    return {EXP_AVG, EXP_AVG_SQ} | ({"max_exp_avg_sq"} if t.group.get("amsgrad") else set())


def _misshapen(t: Trained) -> str:
    for key in state_moments.SHAPED:
        value = t.state.get(key)
        if not isinstance(value, Tensor) or t.stepped is None:
            continue
        if value.shape not in (t.param.shape, t.stepped.shape):
            beside = tuple(t.param.shape)
            return (
                f"{key} has shape {tuple(value.shape)} and the parameter has {beside}: it is the state of another "
                "parameter."
            )
    return ""


def _nonfinite(t: Trained) -> str:
    for key in (EXP_AVG, EXP_AVG_SQ, MOMENTUM, "master_param"):
        value = state_moments.plain(t, key)
        if value is None or value.numel() == 0:
            continue
        low, high = map(float, (value if value.dtype.itemsize > 1 else value.float()).aminmax())
        if not (math.isfinite(low) and math.isfinite(high)):
            return f"{key} has elements that are not finite: every further step writes them into weights."
        if key == EXP_AVG_SQ and low < 0:
            return "exp_avg_sq has negative elements, whose square root is NaN."
    return ""


def _inconsistent(t: Trained) -> str:
    """Returns a message if no gradients can have led to both moments, or if the step count restarted; else "".

    m is a sum of gradients with weights (1 - b1) b1^k, v one of their squares with (1 - b2) b2^k. So by Cauchy and
    Schwarz m^2 <= v * (1 - b1)^2 / ((1 - b2) (1 - b1^2 / b2)), whatever the gradients were.
    """
    betas = t.betas()
    if betas is None or t.stepped is None or t.stepped.numel() == 0 or _misshapen(t):
        return ""
    every = state_moments.sampling_stride(t.stepped.numel())
    m = state_moments.moment(t, EXP_AVG, every)
    v = state_moments.moment(t, EXP_AVG_SQ, every)
    if m is None or v is None or m.numel() != v.numel():
        return ""
    if t.step() == 0 and bool(m.any()):
        return "Moments of earlier steps at step 0: the bias correction makes the next update too large."
    one, two = betas
    if one == 0 or one * one >= two or two >= 1:
        return ""
    bound = (1 - one) / math.sqrt((1 - two) * (1 - one * one / two))
    least = 100 * t.hyper("eps", 1e-8)
    impossible = (m.abs() > _SLACK * bound * v.clamp(min=0).sqrt()) & (m.abs() > least) & m.isfinite()
    share = float(impossible.float().mean())
    if share < _IMPOSSIBLE:
        return ""
    return "exp_avg is larger than any gradients with this exp_avg_sq allow: one of them was not loaded, or underflows."
