"""A small trainer that publishes its weights, and engines that follow it."""

from typing import Any

import torch
from torch import Tensor, nn
from training import POLICIES, bits, policy_of, set_grads

import torch_ext

SHAPES: list[tuple[int, ...]] = [(130, 37), (130,), (3, 5, 7), (1,), (), (0,), (129,), (70, 60)]


class Layers(nn.Module):
    """A model with parameters of these shapes, and a frozen one before them."""

    def __init__(self, policy: str, shapes: list[tuple[int, ...]] = SHAPES, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.frozen = nn.Parameter(torch.randn(33, generator=generator).to(POLICIES[policy][0]), requires_grad=False)
        for i, shape in enumerate(shapes):
            value = torch.randn(shape, generator=generator) * 0.1
            self.register_parameter(f"p{i}", nn.Parameter(value.to(POLICIES[policy][0])))


class Trainer:
    """A model, its optimizer and a publisher. Gradients depend only on the number of the step."""

    def __init__(self, policy: str = "bf16", lr: float = 1e-5, exact: bool = False, **options: Any) -> None:
        self.model = Layers(policy)
        self.params = [p for p in self.model.parameters() if p.requires_grad]
        named = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        options = {"policy": policy_of(policy)} | options
        self.optimizer = torch_ext.AdamW(named, lr=lr, weight_decay=0.0, **options)
        self.steps = 0
        self.exact = exact
        self.publisher = torch_ext.WeightPublisher(self.model, self.optimizer, exact)

    def step(self, n: int = 1) -> None:
        for _ in range(n):
            self.steps += 1
            set_grads(self.params, self.steps)
            self.optimizer.step()
        for p in self.params:
            p.grad = None


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Returns copies of the weights, by name."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


class Engine:
    """A copy of a model's current weights, and a subscriber that updates it."""

    def __init__(self, model: nn.Module) -> None:
        self.tensors = weights(model)
        self.subscriber = torch_ext.WeightSubscriber(self.tensors)

    def differs(self, model: nn.Module) -> list[str]:
        """Returns the names of the parameters whose bits differ from the model's."""
        return [name for name, p in model.named_parameters() if bits(p) != bits(self.tensors[name])]
