"""Checks for an exp_avg_sq that cannot decrease, because rounding undoes the decay."""

from collections.abc import Iterator

import torch

from torch_ext.diagnosis import moment_checks, state_moments
from torch_ext.diagnosis.findings import Finding, finding
from torch_ext.diagnosis.state_moments import EXP_AVG_SQ
from torch_ext.diagnosis.trained_parameters import Reading, Trained
from torch_ext.optim.optimizer_base import OptimizerBase

_BITS = {torch.bfloat16: 7, torch.float16: 10, torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}
_HALF, _SOME = 0.5, 0.05


def check(reading: Reading) -> Iterator[Finding]:
    """Yields findings about a stalled exp_avg_sq. Rounded to nearest, v * beta2 is v again if v * (1 - beta2) is less
    than half the distance to v's neighbour. Then v rises with large gradients and never falls, so steps shrink."""
    found: dict[tuple[torch.dtype, float], dict[str, None]] = {}
    worst: dict[tuple[torch.dtype, float], float] = {}
    for t in reading.trained:
        share, dtype = _stalled(t)
        betas = t.betas()
        if betas is not None and dtype is not None and share > _SOME:
            key = dtype, betas[1]
            found.setdefault(key, {}).update(dict.fromkeys(t.names))
            worst[key] = max(worst.get(key, 0.0), share)
    for (dtype, beta2), names in found.items():
        share = worst[dtype, beta2]
        yield finding(
            "stalled_exp_avg_sq",
            f"exp_avg_sq in {dtype}, rounded to nearest, with beta2 = {beta2:g}: one step takes {1 - beta2:.2g} of "
            "it away, and rounding undoes that. It can rise but not fall, so that updates stay too small.",
            list(names),
            f"optimizer = torch_ext.AdamW(model.parameters(), lr=lr, betas=(0.9, {beta2:g}))  # dithered, or in fp32",
            share,
            "of exp_avg_sq",
            "error" if share >= _HALF else "warning",
        )


def _stalled(t: Trained) -> tuple[float, torch.dtype | None]:
    """Returns the share of v's elements that a step without a gradient leaves unchanged, and v's dtype."""
    betas, ours = t.betas(), isinstance(t.optimizer, OptimizerBase)
    if betas is None or (ours and t.group.get("moment_rounding") != "nearest"):
        return 0.0, None
    v = state_moments.plain(t, EXP_AVG_SQ)
    if v is not None and v.dtype in _BITS and v.numel():
        values = state_moments.sample(v, state_moments.sampling_stride(v.numel())).float()
        values = values[values > torch.finfo(v.dtype).smallest_normal]
        if values.numel():
            return float(((values * betas[1]).to(v.dtype).float() == values).float().mean()), v.dtype
    dtype = v.dtype if v is not None else _future_dtype(t)
    return (stalls(dtype, betas[1]), dtype) if dtype in _BITS else (0.0, None)


def stalls(dtype: torch.dtype, beta2: float) -> float:
    """Returns the share of the numbers in [1, 2) that round to themselves when they are multiplied by beta2."""
    n = 1 << _BITS[dtype]
    numbers = 1 + torch.arange(n, dtype=torch.float32, device="cpu") / n
    return float(((numbers * beta2).to(dtype).float() == numbers).double().mean())


def _future_dtype(t: Trained) -> torch.dtype | None:
    """Returns the dtype of the exp_avg_sq that the first step will create; None if it is unknown or already exists."""
    if moment_checks.has_moments(t):
        return None
    if isinstance(t.optimizer, OptimizerBase):
        return t.kinds_of_ours().exp_avg_sq
    said = getattr(t.optimizer, "exp_avg_sq_dtype", None)
    if isinstance(said, torch.dtype):
        return said
    return t.param.dtype if type(t.optimizer).__module__.startswith("torch.optim") else None
