"""A model whose weights and masters tests write to, between steps."""

import torch
from torch import Tensor, nn
from training import params_of, policy_of, train

import torch_ext

LARGE = [(5, 4096), (130, 37), (7,), (3, 5, 7), (), (1,)]


class Model(nn.Module):
    """Parameters of several sizes. The first is large enough to have several samples: elements that a step compares
    with fp32 masters to find writes."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.weights = nn.ParameterList(params_of(name, LARGE))


def made(name: str, **options: object) -> tuple[Model, torch_ext.AdamW]:
    """Returns a model and its optimizer after three steps."""
    model = Model(name)
    options = {"lr": 1e-2, "weight_decay": 0.0, "policy": policy_of(name)} | options
    optimizer = torch_ext.AdamW(model.named_parameters(), **options)
    train(optimizer, range(3))
    return model, optimizer


def others(model: nn.Module) -> list[Tensor]:
    """Returns other values for the weights."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(p.shape, generator=generator).to(p.dtype) for p in model.parameters()]


def quiet_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Takes a step that moves no weight: gradients and first moments are zero."""
    for p in model.parameters():
        optimizer.state[p]["exp_avg"].zero_()
        p.grad = torch.zeros_like(p)
    optimizer.step()
