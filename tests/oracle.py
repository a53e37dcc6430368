"""Exact results of a step, in float64: AdamW and Adam from the papers, gradient norms, and errors in ulps.

Shares nothing with the kernels: no bit patterns, no fp32, only the formulas as they are printed in the papers.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor


class AdamW:
    """Trains one parameter exactly: Loshchilov & Hutter 2019, Algorithm 2; with `decoupled=False` Kingma & Ba's Adam
    with weight decay added to the gradient. `p`, `m`, `v` are float64 of the parameter's shape; `t` counts steps.
    """

    def __init__(
        self,
        p: Tensor,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        decoupled: bool = True,
        maximize: bool = False,
    ) -> None:
        self.p = p.detach().to(torch.float64, copy=True)
        self.m = torch.zeros_like(self.p)
        self.v = torch.zeros_like(self.p)
        self.t = 0
        self.lr, self.betas, self.eps = lr, betas, eps
        self.weight_decay, self.decoupled, self.maximize = weight_decay, decoupled, maximize

    def step(self, grad: Tensor, *, clip_coef: float = 1.0, grad_scale: float = 1.0) -> Tensor:
        """Takes one step with `grad * clip_coef / grad_scale`; returns the new parameter."""
        beta1, beta2 = self.betas
        g = grad.detach().to(torch.float64) * clip_coef / grad_scale
        if self.maximize:
            g = -g
        if not self.decoupled:
            g = g + self.weight_decay * self.p
        self.t += 1
        self.m = beta1 * self.m + (1 - beta1) * g
        self.v = beta2 * self.v + (1 - beta2) * g * g
        m_hat = self.m / (1 - beta1**self.t)
        v_hat = self.v / (1 - beta2**self.t)
        update = m_hat / (v_hat.sqrt() + self.eps)
        if self.decoupled:
            update = update + self.weight_decay * self.p
        self.p = self.p - self.lr * update
        return self.p


def norm(grads: Iterable[Tensor]) -> float:
    """Returns the Euclidean norm over all elements of all tensors; the sum is exact up to the last rounding."""
    squares = (math.fsum(g.detach().to(torch.float64).square().flatten().tolist()) for g in grads)
    return math.sqrt(math.fsum(squares))


def clip_coefficient(total_norm: float, max_norm: float) -> float:
    """Returns the factor by which clipping multiplies gradients: max_norm / (norm + 1e-6), at most 1."""
    return min(1.0, max_norm / (total_norm + 1e-6))


def ulp(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the distance between neighbouring numbers of `dtype` at `exact`, in float64; for subnormal numbers their
    constant distance."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(exact.abs().clamp_min(info.tiny))
    return torch.ldexp(torch.full_like(exact, info.eps), exponent - 1)


def ulp_error(actual: Tensor, exact: Tensor) -> float:
    """Returns the largest error of `actual` in ulps of its dtype; 0.5 is correct rounding."""
    if actual.numel() == 0:
        return 0.0
    error = (actual.detach().to(torch.float64) - exact).abs()
    return (error / ulp(exact, actual.dtype)).max().item()
