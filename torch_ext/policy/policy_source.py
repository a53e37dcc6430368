"""Finds the dtype of load_policy's argument `model`, and the dtype in which FSDP2's MixedPrecisionPolicy computes."""

from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import nn

from torch_ext.native import dtypes
from torch_ext.policy import fsdp_groups


class Precision(NamedTuple):
    """The dtypes of a parameter that FSDP2 shards."""

    computed: torch.dtype
    """The dtype in forward and backward."""
    own: torch.dtype
    """The dtype of the parameter's shards."""


def precisions(model: nn.Module) -> dict[int, Precision]:
    """Returns the dtypes of the parameters that FSDP2 shards, by the ids of their sharded and unsharded tensors."""
    found: dict[int, Precision] = {}
    for group in fsdp_groups.in_model(model):
        for param in group.fsdp_params:
            own = param.sharded_param.dtype
            precision = Precision(param.mp_policy.param_dtype or own, own)
            for tensor in (param.sharded_param, getattr(param, "_unsharded_param", None)):
                found[id(tensor)] = precision
    return found


class Source(NamedTuple):
    """What load_policy's arguments say of the model: its tx_dtype (0: not given), the flags, and the tx_dtype of
    FSDP2's shards (0: none that are masters)."""

    dtype: int
    bf16: bool | None
    fp16: bool | None
    shards: int = 0


def of(model: Any, bf16: bool | None, fp16: bool | None) -> Source:
    """Returns the source for `load_policy`'s arguments. Raises TypeError for an illegal kind of model, ValueError for a
    dtype that cannot be trained."""
    shards = None
    if model is None:
        return Source(0, bf16, fp16)
    if isinstance(model, torch.nn.Module):
        (dtype, shards), what = _model_dtypes(model), type(model).__name__
    elif isinstance(model, torch.dtype):
        dtype, what = model, "model"
    elif isinstance(model, str):
        dtype, what = dtypes.coerce_dtypes({"param_dtype": model})["param_dtype"], "model"
        if dtype is None:
            return Source(0, bf16, fp16)
    elif hasattr(model, "bf16") or hasattr(model, "fp16"):
        own_bf16, own_fp16 = bool(getattr(model, "bf16", False)), bool(getattr(model, "fp16", False))
        return Source(0, own_bf16 if bf16 is None else bf16, own_fp16 if fp16 is None else fp16)
    else:
        raise TypeError(
            f"model is a {type(model).__name__}; a torch.nn.Module, a dtype, a dtype's name, or a configuration with "
            "bf16 and fp16 attributes is legal"
        )
    code = dtypes.code_of(dtype)
    if code is None or dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"{what} is in {dtype}; float32, bfloat16 and float16 are what torch_ext trains")
    return Source(code, bf16, fp16, 0 if shards is None else dtypes.code_of(shards) or 0)


def _model_dtypes(model: torch.nn.Module) -> tuple[torch.dtype, torch.dtype | None]:
    """Returns the dtype of most trainable elements (of all floating-point ones if nothing is trainable), and the dtype
    of FSDP2's shards: float32 if most of these elements are in fp32 shards that are computed in a narrower dtype, else
    None."""
    of_shards = precisions(model)
    parameters = [p for p in model.parameters() if p.is_floating_point()]
    elements: Counter[torch.dtype] = Counter()
    sharded: Counter[torch.dtype] = Counter()
    for p in [p for p in parameters if p.requires_grad] or parameters:
        computed, own = of_shards.get(id(p), (p.dtype, p.dtype))
        masters = own == torch.float32 and computed.itemsize < own.itemsize
        dtype = computed if masters else own  # a shard that is no wider than the computed weight is no master
        elements[dtype] += max(p.numel(), 1)
        sharded[dtype] += max(p.numel(), 1) if masters else 0
    if not elements:
        raise ValueError(
            f"{type(model).__name__} has no floating-point parameters to take a dtype from; pass the dtype instead"
        )
    ((dtype, most),) = elements.most_common(1)
    return dtype, torch.float32 if 2 * sharded[dtype] > most else None
