"""A byte-level GPT: 256 symbols, rotary positions, pre-norm blocks, the output layer tied to the embedding.

It does not use torch_ext; all configurations share it. `GPT(config).to(torch.bfloat16)` is the bf16 model. Its weights,
activations and gradients have 16 bits everywhere. A matrix product multiplies bf16 numbers, sums in fp32 and rounds the
result once, as a bf16 matrix unit does. Many CPUs have no such unit, and torch's substitute is several times slower
there than fp32. So the products below are computed in fp32, on the same bf16 numbers: `x.float()` is exact, the product
of two bf16 numbers is exact in fp32, and only the order of the sum differs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Config:
    layers: int
    heads: int
    width: int
    context: int


class _WideLinear(torch.autograd.Function):
    """x @ weight.T and its two gradients, computed in fp32 from the stored numbers; each result is rounded once."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:  # noqa: ANN001
        ctx.save_for_backward(x, weight)
        return (x.float() @ weight.float().t()).to(x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN001
        x, weight = ctx.saved_tensors
        wide = grad.float()
        grad_x = (wide @ weight.float()).to(x.dtype)
        grad_weight = (wide.flatten(0, -2).t() @ x.float().flatten(0, -2)).to(weight.dtype)
        return grad_x, grad_weight


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return _WideLinear.apply(x, self.weight)


def rotation_table(context: int, width: int) -> Tensor:
    """cos and sin of position / 10000^(i / (width/2)): fp32 [2, context, width / 2] (Su et al. 2021, RoFormer)."""
    angle = torch.arange(context)[:, None] * 10000.0 ** -torch.linspace(0, 1, width // 2 + 1)[:-1]
    return torch.stack((angle.cos(), angle.sin()))


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotates each pair (x[i], x[i + width/2]) by the angle of its position. x: [..., length, width]."""
    cos, sin = rotation[:, : x.shape[-2]]
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.norm1 = nn.LayerNorm(width, bias=False)
        self.qkv = Linear(width, 3 * width, bias=False)
        self.out = Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width, bias=False)
        self.up = Linear(width, 4 * width, bias=False)
        self.down = Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).float().view(batch, length, 3, self.heads, -1).transpose(1, 3)
        q, k, v = qkv.unbind(2)
        heads = F.scaled_dot_product_attention(rotate(q, rotation), rotate(k, rotation), v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).reshape(batch, length, width).to(x.dtype))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.bytes = nn.Embedding(256, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=False)
        self.rotation = rotation_table(config.context, config.width // config.heads)  # not a buffer: it stays fp32
        for name, p in self.named_parameters():
            if p.dim() == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / (2 * config.layers) ** 0.5 if residual else 0.02)

    def forward(self, text: Tensor) -> Tensor:
        """Returns the mean negative log-likelihood in nats per byte, fp32. text: uint8 or int64 [batch, length + 1]."""
        inputs, targets = text[:, :-1].long(), text[:, 1:].long()
        x = self.bytes(inputs)
        for block in self.blocks:
            x = block(x, self.rotation)
        logits = _WideLinear.apply(self.norm(x), self.bytes.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
