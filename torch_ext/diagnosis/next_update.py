"""What the next step would do to a weight, and how much of it rounding to the weight's dtype would undo.

Note: an update is lost where weight + update, rounded to the nearest number of the weight's dtype, is the weight again:
where it is less than half of the distance between the weight and its neighbour (half an ulp). bf16 has 8 bits of
significand, so this distance is 2^-8 to 2^-7 of the weight, and an update below 0.2 to 0.4 % of it is lost. The next
gradient is not known. What the moments stand for is taken: for Adam, lr * m / (sqrt(v) + eps) with both corrected for
their start; before there are moments, lr, which is what Adam's first step is.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torch_ext.diagnosis import state_moments
from torch_ext.diagnosis.trained_parameters import Trained
from torch_ext.params import local_shard


class Lost(NamedTuple):
    updates: int
    """Elements that the next step would change, of those that were looked at."""
    lost: int
    """Of these, how many rounding would leave as they are."""

    @property
    def share(self) -> float:
        return self.lost / self.updates if self.updates else 0.0


def learning_rate(t: Trained) -> float:
    """The group's; where it is 0, before a warm-up say, the one from which a scheduler began."""
    estimated = t.hyper("d", 1.0) if "d0" in t.group else 1.0  # Prodigy and D-Adaptation find a factor of it
    return (t.hyper("lr") or t.hyper("initial_lr")) * estimated


def lost_updates(t: Trained) -> Lost | None:
    """Of a weight that is stepped itself; None where nothing can be said of its update."""
    if t.weight is None or t.weight.numel() == 0:
        return None
    every = state_moments.every_of(t.weight.numel())
    weight = state_moments.sample(t.weight, every)
    update = _update(t, every, weight)
    if update is None:
        return None
    update = update.to(weight.device)
    moves = update != 0
    stays = moves & ((weight.float() - update).to(weight.dtype) == weight)
    return Lost(int(moves.sum()), int(stays.sum()))


def _update(t: Trained, every: int, weight: Tensor) -> Tensor | None:
    """What is subtracted from the weight, in fp32; 0 where no gradient has come so far."""
    lr = learning_rate(t)
    of_gradient = _of_gradient(t, every, weight, lr)
    if of_gradient is None or not _decouples(t):
        return of_gradient
    decay = lr * t.hyper("weight_decay")
    return torch.where(of_gradient != 0, of_gradient + decay * weight.float().to(of_gradient.device), of_gradient)


def _decouples(t: Trained) -> bool:
    """Whether weight decay shrinks the weight, as AdamW's, and is not in the gradient."""
    said = t.group.get("decoupled_weight_decay", getattr(t.optimizer, "adam_w_mode", None))
    return bool(said) if said is not None else "adamw" in type(t.optimizer).__name__.lower()


def _of_gradient(t: Trained, every: int, weight: Tensor, lr: float) -> Tensor | None:
    if "ns_steps" in t.group:
        return _orthogonal(t, lr, weight)
    if t.betas() is not None:
        return _adam(t, every, weight, lr)
    if "square_avg" in t.state:  # RMSprop: a gradient as large as the others
        return lr * _first_sign(t, every, weight)
    if "dampening" in t.group:
        averaged = state_moments.moment(t, state_moments.MOMENTUM, every)
        gradient = _gradient(t, every) if averaged is None else averaged
        return None if gradient is None else lr * gradient
    return None


def _adam(t: Trained, every: int, weight: Tensor, lr: float) -> Tensor:
    betas = t.betas()
    assert betas is not None
    m = state_moments.moment(t, state_moments.EXP_AVG, every)
    v = state_moments.moment(t, state_moments.EXP_AVG_SQ, every)
    steps = t.step()
    if m is None or steps == 0:
        return lr * _first_sign(t, every, weight)
    if v is None:  # Lion, and whatever else has one moment, or a second one in another form
        return lr * torch.sign(m)
    correct = t.group.get("bias_correction", True) and steps is not None
    one, two = (1 - betas[0] ** steps, 1 - betas[1] ** steps) if correct and steps is not None else (1.0, 1.0)
    return lr * (m / one) / ((v.clamp(min=0) / two).sqrt() + t.hyper("eps", 1e-8))


def _first_sign(t: Trained, every: int, weight: Tensor) -> Tensor:
    """The direction of Adam's first step; towards 0 where there is no gradient yet."""
    gradient = _gradient(t, every)
    return torch.ones_like(weight, dtype=torch.float32).copysign(weight) if gradient is None else torch.sign(gradient)


def _gradient(t: Trained, every: int) -> Tensor | None:
    gradient = t.param.grad
    if gradient is None or gradient.layout is not torch.strided or t.weight is None:
        return None
    local = local_shard.tensor_of(gradient).detach()
    return state_moments.sample(local, every).float() if local.numel() == t.weight.numel() else None


def _orthogonal(t: Trained, lr: float, weight: Tensor) -> Tensor | None:
    """Muon's: a matrix with singular values near 1, of which an element is about 1 / sqrt(the longer side)."""
    if state_moments.moment(t, state_moments.MOMENTUM, 1) is None and t.param.grad is None:
        return None
    rows, columns = t.param.shape[0], max(1, t.param.numel() // max(1, t.param.shape[0]))
    longer, how = max(rows, columns), t.group.get("adjust_lr_fn")
    ratio = 0.2 * math.sqrt(longer) if how == "match_rms_adamw" else math.sqrt(max(1.0, rows / columns))
    return torch.full_like(weight, lr * ratio / math.sqrt(longer), dtype=torch.float32)
