"""The optimizer configurations that the main job compares.

`python examples/gpt/finetune.py --more` also trains those of MORE, which differ in what is rounded, and how.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from model import GPT
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).absolute().parents[2]))  # the repository's root; not needed where it is installed
import torch_ext

# The `override_optimizer_config` of each name of `Configuration.states`.
STATES: dict[str, dict[str, Any]] = {
    **{word: {"states": word} for word in ("bf16", "bf16_remainder", "8bit")},
    "no masters": {"main_params_dtype": None},
}


@dataclass(frozen=True)
class Training:
    """A model in training. Call `module`, step `optimizer`; `clip(max_norm)` clips gradients and returns their norm."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    clip: Callable[[float], Tensor]


@dataclass(frozen=True)
class Configuration:
    label: str
    dtype: torch.dtype = torch.bfloat16  # of the model
    states: str | None = None  # of torch_ext.AdamW, a key of STATES; None: torch.optim.AdamW
    roundings: Mapping[str, Any] = field(default_factory=dict)  # arguments of torch_ext.AdamW

    def prepare(self, model: GPT, weight_decay: float, seed: int, distributed: bool) -> Training:
        """Creates the optimizer of `model`, which has this configuration's dtype.

        distributed: also makes the model data parallel over the default process group.
        """
        if self.states is None:
            module = DistributedDataParallel(model, gradient_as_bucket_view=True) if distributed else model
            stock = torch.optim.AdamW(model.parameters(), weight_decay=weight_decay, fused=True)
            return Training(module, stock, lambda norm: nn.utils.clip_grad_norm_(model.parameters(), norm))
        policy = torch_ext.load_policy(model, override_optimizer_config=STATES[self.states])
        if distributed:
            torch_ext.parallelize(model, policy)
        ours = torch_ext.AdamW(
            model.named_parameters(), weight_decay=weight_decay, policy=policy, seed=seed, **self.roundings
        )
        return Training(model, ours, lambda norm: torch_ext.clip_grad_norm_(ours, norm))


CONFIGURATIONS = {
    "torch-fp32": Configuration("torch AdamW, fp32 model", dtype=torch.float32),
    "torch-bf16": Configuration("torch AdamW, bf16 model"),
    "bf16": Configuration("torch_ext `bf16`", states="bf16"),
    "bf16_remainder": Configuration("torch_ext `bf16_remainder`", states="bf16_remainder"),
    "8bit": Configuration("torch_ext `8bit`", states="8bit"),
}
_NEAREST = {"moment_rounding": "nearest"}
_DITHERED_WEIGHTS, _NEAREST_WEIGHTS = {"weight_rounding": "dithered"}, {"weight_rounding": "nearest"}
MORE = {
    "bf16_remainder-nearest": Configuration(
        "`bf16_remainder`, moments to nearest", states="bf16_remainder", roundings=_NEAREST
    ),
    "8bit-nearest": Configuration("`8bit`, moments to nearest", states="8bit", roundings=_NEAREST),
    "no_masters-dithered": Configuration(
        "no masters, weights dithered", states="no masters", roundings=_DITHERED_WEIGHTS
    ),
    "no_masters-nearest": Configuration(
        "no masters, weights to nearest", states="no masters", roundings=_NEAREST_WEIGHTS
    ),
}
