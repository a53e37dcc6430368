"""The norm of all gradients, and clipping by it."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from torch_ext.grads import clipped
from torch_ext.grads.norm import Clipping, measure
from torch_ext.optim.grad_scaling import GradScaling
from torch_ext.params.param_groups import innermost
from torch_ext.tensors import dense


def clip_grad_norm_(
    optimizer_or_params: "torch.optim.Optimizer | Tensor | Iterable[Tensor]",
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Clips gradients to a total norm. Returns the norm of all of them before clipping, a one-element fp32 tensor.

    Given an optimizer of ours, or a framework's wrapper of one, it only reads the gradients: the next step multiplies
    them by the coefficient, max_norm / (norm + 1e-6) where that is below 1, and is skipped if the norm is not finite.
    zero_grad drops the coefficient. Given parameters (or one tensor), it multiplies gradients in place, as
    torch.nn.utils.clip_grad_norm_ does; if the norm is not finite all gradients become NaN, so that a step with them
    does not go unnoticed. Both are collective where gradients are sharded.

    optimizer_or_params: an optimizer, one tensor, or parameters; their gradients are fp32, bf16 or fp16.
    max_norm: > 0; math.inf only measures.
    norm_type: 2.
    error_if_nonfinite: RuntimeError where the norm is not finite, gradients untouched.
    foreach: accepted and without effect: gradients always go to one operator.

    Raises ValueError for another max_norm or norm_type, TypeError for an optimizer whose step applies no coefficient.
    """
    if norm_type != 2:
        raise ValueError(
            f"norm_type is {norm_type}; 2 is legal: for other norms use torch.nn.utils.clip_grad_norm_ on the "
            "parameters, if gradients are not sharded"
        )
    max_norm = float(max_norm)
    if not max_norm > 0:
        raise ValueError(f"max_norm is {max_norm}; a number > 0 is legal (math.inf measures without clipping)")
    if isinstance(optimizer_or_params, torch.optim.Optimizer):
        return _clip_at_step(optimizer_or_params, max_norm, error_if_nonfinite)
    if isinstance(optimizer_or_params, torch.nn.Module) and not isinstance(optimizer_or_params, torch.nn.ParameterList):
        raise TypeError(
            f"clip_grad_norm_() was given a {type(optimizer_or_params).__name__}, a module: pass the optimizer, whose "
            "next step() then clips, or model.parameters()"
        )
    params = [optimizer_or_params] if isinstance(optimizer_or_params, Tensor) else list(optimizer_or_params)
    clipping, grads = _measured(params, max_norm)
    _raise_if(error_if_nonfinite, clipping)
    if grads and max_norm != math.inf:
        bad = clipping.found_inf != 0
        coefficient = torch.where(bad, torch.full_like(clipping.clip_coef, math.nan), clipping.clip_coef)
        with torch.no_grad():
            torch._foreach_mul_(grads, coefficient)
    clipped.notify_clipped(params, max_norm)
    return clipping.norm


def _measured(params: Sequence[Tensor], max_norm: float) -> tuple[Clipping, list[Tensor]]:
    """Measures the norm of these parameters' gradients. Returns it with the tensors to multiply: `.grad`, or the shard
    that a reducer of ours has."""
    from torch_ext.params import local_shard, reducer_registry, shard_map

    for owner in reducer_registry.owners_of(params):
        owner.before_step("clip_grad_norm_()")
    found = shard_map.ShardMap(params)
    grads = found.grads()
    present = [grad is not None for grad in grads]
    parts = None if found.plain else found.parts(present)
    clipping = measure([grad for grad in grads if grad is not None], max_norm, dense.EMPTY, parts)
    owned = zip(params, found.owners, grads, strict=True)
    return clipping, [
        grad if owner is not None else local_shard.tensor_of(p.grad) for p, owner, grad in owned if grad is not None
    ]


def _clip_at_step(optimizer: torch.optim.Optimizer, max_norm: float, error_if_nonfinite: bool) -> Tensor:
    optimizer = innermost(optimizer)
    scaling = getattr(optimizer, "_scaling", None)
    if not isinstance(scaling, GradScaling):
        raise TypeError(
            f"{type(optimizer).__name__} does not apply a clip coefficient in its step; pass the parameters instead, "
            "or use torch_ext.AdamW"
        )
    clipping = optimizer.writing_calls.run("clip_grad_norm_()", scaling.clip, max_norm)  # type: ignore[attr-defined]
    if error_if_nonfinite:
        try:
            _raise_if(True, clipping)
        except RuntimeError:
            scaling.clipping = None
            raise
    return clipping.norm


def _raise_if(wanted: bool, clipping: Clipping) -> None:
    if wanted and clipping.found_inf.item() != 0:
        raise RuntimeError(
            f"the total norm of the gradients is {clipping.norm.item()}, so they cannot be clipped; leave out "
            "error_if_nonfinite to skip such steps"
        )
