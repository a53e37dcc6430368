"""Finds FSDP2's parameter groups, the parameters that it gathers together. torch has no public function for them."""

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn


def in_model(model: nn.Module) -> Iterator[Any]:
    """Yields the groups of all FSDP modules in the model."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # without it no module is sharded
    if fsdp is None:
        return
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            yield from of_module(module)


def of_module(module: Any) -> Iterator[Any]:
    """Yields the groups of one FSDPModule."""
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # newer torch: several groups per module
    yield from groups if groups is not None else filter(None, [state._fsdp_param_group])
