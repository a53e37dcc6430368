"""Estimates the next update of a weight, and how much of it is lost by rounding to the weight's dtype.

Note: an update is lost if weight + update, rounded to the nearest number of the weight's dtype, is the weight again.
That is so if the update is less than half the distance from the weight to its neighbour (half an ulp). bf16 has 8 bits
of significand, so this distance is 2^-8 to 2^-7 of the weight, and an update below 0.2 to 0.4 % of it is lost. The next
gradient is unknown, so the update is computed from the moments: for Adam, lr * m / (sqrt(v) + eps), both with bias
correction. Before there are moments it is lr, which is the size of Adam's first step.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torch_ext.diagnosis import state_moments
from torch_ext.diagnosis.trained_parameters import Trained
from torch_ext.params import local_shard


class Lost(NamedTuple):
    """How many updates would be lost."""

    updates: int
    """Number of sampled elements that the next step would change without rounding."""
    lost: int
    """Number of these elements that rounding would leave unchanged."""

    @property
    def share(self) -> float:
        return self.lost / self.updates if self.updates else 0.0


def learning_rate(t: Trained) -> float:
    """Returns the group's learning rate; if it is 0 (before a warm-up, say), the scheduler's initial_lr."""
    estimated = t.hyper("d", 1.0) if "d0" in t.group else 1.0  # Prodigy and D-Adaptation multiply lr by `d`
    return (t.hyper("lr") or t.hyper("initial_lr")) * estimated


def lost_updates(t: Trained) -> Lost | None:
    """Returns the lost updates of a weight that is updated without a master; None if its update cannot be estimated."""
    if t.weight is None or t.weight.numel() == 0:
        return None
    every = state_moments.sampling_stride(t.weight.numel())
    weight = state_moments.sample(t.weight, every)
    update = _update(t, every, weight)
    if update is None:
        return None
    update = update.to(weight.device)
    moves = update != 0
    stays = moves & ((weight.float() - update).to(weight.dtype) == weight)
    return Lost(int(moves.sum()), int(stays.sum()))


def _update(t: Trained, every: int, weight: Tensor) -> Tensor | None:
    """Returns what is subtracted from the weight, in fp32; 0 for elements that had no gradient so far."""
    lr = learning_rate(t)
    without_decay = _update_without_decay(t, every, weight, lr)
    if without_decay is None or not _decouples(t):
        return without_decay
    decay = lr * t.hyper("weight_decay")
    return torch.where(
        without_decay != 0, without_decay + decay * weight.float().to(without_decay.device), without_decay
    )


def _decouples(t: Trained) -> bool:
    """Whether weight decay is decoupled from the gradient, as AdamW's is."""
    said = t.group.get("decoupled_weight_decay", getattr(t.optimizer, "adam_w_mode", None))
    return bool(said) if said is not None else "adamw" in type(t.optimizer).__name__.lower()


def _update_without_decay(t: Trained, every: int, weight: Tensor, lr: float) -> Tensor | None:
    """Returns the update without decoupled weight decay; None for an unknown kind of optimizer."""
    if "ns_steps" in t.group:
        return _orthogonal(t, lr, weight)
    if t.betas() is not None:
        return _adam(t, every, weight, lr)
    if "square_avg" in t.state:  # RMSprop: assumes a gradient of the usual size
        return lr * _first_step_signs(t, every, weight)
    if "dampening" in t.group:
        averaged = state_moments.moment(t, state_moments.MOMENTUM, every)
        gradient = _gradient(t, every) if averaged is None else averaged
        return None if gradient is None else lr * gradient
    return None


def _adam(t: Trained, every: int, weight: Tensor, lr: float) -> Tensor:
    """Returns the update of Adam, or of an optimizer with Adam's betas and a single moment."""
    betas = t.betas()
    assert betas is not None
    m = state_moments.moment(t, state_moments.EXP_AVG, every)
    v = state_moments.moment(t, state_moments.EXP_AVG_SQ, every)
    steps = t.step()
    if m is None or steps == 0:
        return lr * _first_step_signs(t, every, weight)
    if v is None:  # Lion, and other optimizers without a second moment or with one in another form
        return lr * torch.sign(m)
    correct = t.group.get("bias_correction", True) and steps is not None
    one, two = (1 - betas[0] ** steps, 1 - betas[1] ** steps) if correct and steps is not None else (1.0, 1.0)
    return lr * (m / one) / ((v.clamp(min=0) / two).sqrt() + t.hyper("eps", 1e-8))


def _first_step_signs(t: Trained, every: int, weight: Tensor) -> Tensor:
    """Returns the signs of Adam's first step; those of a step towards 0 if there is no gradient yet."""
    gradient = _gradient(t, every)
    return torch.ones_like(weight, dtype=torch.float32).copysign(weight) if gradient is None else torch.sign(gradient)


def _gradient(t: Trained, every: int) -> Tensor | None:
    gradient = t.param.grad
    if gradient is None or gradient.layout is not torch.strided or t.weight is None:
        return None
    local = local_shard.tensor_of(gradient).detach()
    return state_moments.sample(local, every).float() if local.numel() == t.weight.numel() else None


def _orthogonal(t: Trained, lr: float, weight: Tensor) -> Tensor | None:
    """Returns the size of Muon's update: a matrix with singular values near 1, whose elements are about 1 / sqrt(longer
    side)."""
    if state_moments.moment(t, state_moments.MOMENTUM, 1) is None and t.param.grad is None:
        return None
    rows, columns = t.param.shape[0], max(1, t.param.numel() // max(1, t.param.shape[0]))
    longer, how = max(rows, columns), t.group.get("adjust_lr_fn")
    ratio = 0.2 * math.sqrt(longer) if how == "match_rms_adamw" else math.sqrt(max(1.0, rows / columns))
    return torch.full_like(weight, lr * ratio / math.sqrt(longer), dtype=torch.float32)
