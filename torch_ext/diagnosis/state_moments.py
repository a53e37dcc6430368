"""Decodes the moments of any optimizer to fp32: torch's, Transformer Engine's scaled ones, 8-bit codes with a table,
and ours."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torch_ext.diagnosis.model_parameters import readable
from torch_ext.diagnosis.trained_parameters import Trained
from torch_ext.optim.optimizer_base import OptimizerBase
from torch_ext.optim.state import codec
from torch_ext.params import local_shard

EXP_AVG, EXP_AVG_SQ, MOMENTUM = "exp_avg", "exp_avg_sq", "momentum_buffer"
SHAPED = (EXP_AVG, EXP_AVG_SQ, "max_exp_avg_sq", MOMENTUM)
"""Keys of state tensors that have the parameter's shape."""
_CODED = {EXP_AVG: "1", EXP_AVG_SQ: "2", MOMENTUM: "1"}  # bitsandbytes: state1, qmap1, absmax1; state2 ...
_BLOCKS = tuple(1 << n for n in range(6, 15))

_MOST_DECODED = 1 << 24  # elements; larger encoded states of ours are skipped, since they are decoded as a whole

MOST = 1 << 18
"""Most elements of one parameter that are sampled to measure shares, evenly spread over the parameter."""


def sample(t: Tensor, every: int) -> Tensor:
    """Returns each `every`-th element of a tensor in logical order, flat."""
    return t.reshape(-1)[::every]


def sampling_stride(numel: int, most: int = MOST) -> int:
    """Returns the stride with which numel elements are sampled (`sample`), so that at most `most` are read."""
    return max(1, -(-numel // most))


def plain(t: Trained, key: str) -> Tensor | None:
    """Returns this rank's elements of a moment as they are stored; None if there is none, or it is encoded."""
    value = t.state.get(key)
    if not isinstance(value, Tensor) or _scaled_of_ours(t, key):
        return None
    return readable(value)


def moment(t: Trained, key: str, every: int) -> Tensor | None:
    """Returns each `every`-th value of a moment in fp32, flat; None if there is no such moment, or its encoding is
    unknown here."""
    value = t.state.get(key)
    if value is None and key in _CODED:
        return _coded(t.state, _CODED[key], every)
    if not isinstance(value, Tensor):
        return None
    if _scaled_of_ours(t, key):
        return _decoded_ours(t, key, every)
    unscaled = getattr(t.optimizer, "get_unscaled_state", None)
    if callable(unscaled) and value.dtype in (torch.float16, torch.uint8):
        value = unscaled(t.param, key)
    elif type(value) is not Tensor and not local_shard.is_dtensor(value) and not value.is_sparse:
        value = value.dequantize() if hasattr(type(value), "__tensor_flatten__") else value
    values = readable(value)
    misshapen = values is None or t.stepped is None or values.numel() != t.stepped.numel()
    return None if values is None or misshapen else sample(values, every).float()


def _scaled_of_ours(t: Trained, key: str) -> bool:
    return isinstance(t.optimizer, OptimizerBase) and t.state[key].dtype in (torch.float16, torch.uint8)


def _decoded_ours(t: Trained, key: str, every: int) -> Tensor | None:
    if t.stepped is None or t.stepped.numel() > _MOST_DECODED:
        return None
    return sample(codec.decode(t.stepped, t.state, t.kinds_of_ours(), key), every).float()


def _coded(state: Mapping[str, Any], n: str, every: int) -> Tensor | None:
    """Decodes bitsandbytes' format: codes, a table of their values, and the largest magnitude of each block."""
    codes = state.get(f"state{n}")
    if not isinstance(codes, Tensor):
        return None
    if codes.is_floating_point():
        return sample(codes.detach(), every).float()
    table, scales = state.get(f"qmap{n}"), state.get(f"absmax{n}", state.get(f"max{n}"))
    if codes.dtype != torch.uint8 or not isinstance(table, Tensor) or not isinstance(scales, Tensor):
        return None
    numel, blocks = codes.numel(), scales.numel()
    size = numel if blocks == 1 else next((b for b in _BLOCKS if -(-numel // b) == blocks), None)
    if not size:
        return None
    at = torch.arange(0, numel, every, device=scales.device)
    values = table.detach()[sample(codes.detach(), every).long()]
    return values.float() * scales.detach().reshape(-1)[at // size].float()
