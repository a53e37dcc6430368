"""Helpers of the tests of offload() and onload(): a model with awkward parts and its optimizer, trained for one
step."""

from typing import Any

import torch
import training
from torch import Tensor, nn

import torch_ext

KINDS = ("params", "grads", "states")
STEPS = 3


class Net(nn.Module):
    """A model with a frozen layer, a buffer, tied weights, and a weight in channels_last memory."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, order: Any = torch.channels_last) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.first, self.second = nn.Linear(8, 300), nn.Linear(300, 8)
        self.tied = nn.Linear(300, 8)
        self.norm = nn.BatchNorm1d(8)
        self.to(dtype).to(memory_format=order)  # type: ignore[call-overload]
        self.tied.weight = self.second.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.frozen(x))
        x = x + self.conv(x.reshape(-1, 2, 2, 2)).flatten(1)[:, :8]
        x = self.first(x).relu()
        return self.second(x) + self.tied(x.sin())


def loss_of(model: nn.Module, step: int) -> Tensor:
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
    return model(x.to(next(model.parameters()).dtype)).float().pow(2).mean()


def adamw(model: nn.Module, **options: Any) -> torch_ext.AdamW:
    return torch_ext.AdamW(model.named_parameters(), lr=1e-2, policy=torch_ext.load_policy(model), **options)


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    loss_of(model, step).backward()
    if isinstance(optimizer, torch_ext.Adam):
        torch_ext.clip_grad_norm_(optimizer, 1.0)
    optimizer.step()


def trained(**options: Any) -> tuple[Net, torch_ext.AdamW]:
    """Returns a model and its optimizer after one step."""
    model = Net()
    optimizer = adamw(model, **options)
    one_step(model, optimizer, 0)
    return model, optimizer


def weights(model: nn.Module) -> list[Tensor]:
    """Returns the model's parameters and buffers."""
    return [*model.parameters(), *model.buffers()]


def states(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Returns the optimizer's state tensors but for step counts."""
    return [t for entry in optimizer.state.values() for key, t in entry.items() if key != "step"]


def memory(tensors: list[Tensor]) -> int:
    """Returns how many bytes the tensors' storages have, counting each storage once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def bits(tensors: list[Tensor]) -> list[bytes]:
    """Returns the bytes of each tensor. They are read from copies: memory that numpy has seen cannot be released any
    more."""
    return [training.bits(t.detach().clone()) for t in tensors]


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[bytes]:
    """Returns the bytes of everything that training depends on: weights, buffers, optimizer state, step counts."""
    steps = [entry["step"] for entry in optimizer.state.values() if "step" in entry]
    return bits([*weights(model), *states(optimizer), *steps])
