"""A plugin of pytest: transport="nccl" is for memory of the host, too. With TORCH_EXT_NCCL naming a pretended NCCL the
bodies of tests/gpu/test_gpu_exchange.py run where there is no GPU."""

import sys

import torch

import torch_ext  # noqa: F401 - whose modules are patched
from torch_ext.comm import nccl_transport

_refuse = nccl_transport.refuse


def _refuse_others(name: str, device: torch.device) -> None:
    if name != "nccl":
        _refuse(name, device)


for _module in [module for name, module in sys.modules.items() if name.startswith("torch_ext.")]:
    if getattr(_module, "refuse", None) is _refuse:
        setattr(_module, "refuse", _refuse_others)  # noqa: B010 - modules are typed without it
