"""Small parameters and a model for tests of torch_ext.Muon; random gradients, bits."""

from typing import Any

import torch
from torch import Tensor, nn

F32, BF16 = torch.float32, torch.bfloat16
STATES = ("fp32", "bf16", "bf16_remainder", "8bit")


def filled(params: list[nn.Parameter], seed: int) -> list[Tensor]:
    """Sets random gradients and returns them."""
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
    return [p.grad for p in params if p.grad is not None]


def matrices(shapes: list[tuple[int, ...]], dtype: torch.dtype = F32, seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def bits(tensors: Any) -> list[bytes]:
    return [bytes(t.detach().contiguous().view(-1).view(torch.uint8).tolist()) for t in tensors]


class Tied(nn.Module):
    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.body = nn.Linear(16, 16)
        self.conv = nn.Conv1d(16, 16, 3)
        self.head = nn.Linear(16, 20, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def get_output_embeddings(self) -> nn.Module:
        return self.head
