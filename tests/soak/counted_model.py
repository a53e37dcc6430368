"""A model whose gradients are given integers, so that sums are exact in every dtype of the wire, and the weights that
plain torch trains with them."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

BLOCKS: list[list[tuple[int, ...]]] = [[(40, 7), (7,)], [(129,), (3, 5)], [(300,)], [(16, 33), (2,)]]
SHAPES = [shape for block in BLOCKS for shape in block]
# eps is as large as the gradients: otherwise AdamW's step would depend on their sign only, and hide wrong sizes.
OPTIONS: dict[str, Any] = {"lr": 0.1, "eps": 1.0, "weight_decay": 0.01}


class UserError(Exception):
    """Stands for an exception from the user's code."""


class Block(nn.Module):
    """Parameters p0, p1, ...; `before` and `behind` are called in its forward and backward."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], seed: int) -> None:
        super().__init__()
        for i, shape in enumerate(shapes):
            values = torch.randn(shape, generator=torch.Generator().manual_seed(10 * seed + i))
            self.register_parameter(f"p{i}", nn.Parameter(values))
        self.before: Callable[[], None] | None = None
        self.behind: Callable[[], None] | None = None

    def forward(self, x: torch.Tensor, grads: Sequence[torch.Tensor]) -> torch.Tensor:
        """Adds terms whose gradients are exactly `grads`.

        `before` is called in forward; `behind` in backward, after the backward of the later blocks."""
        if self.before is not None:
            self.before()
        terms = [(p * g).sum() for p, g in zip(self.parameters(), grads, strict=True)]
        out = x + torch.stack(terms).sum()
        if self.behind is not None and out.requires_grad:
            behind = self.behind
            out.register_hook(lambda _: behind())
        return out


class Model(nn.Module):
    """One Block for each entry of BLOCKS; grads are in the order of SHAPES."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(shapes, i) for i, shapes in enumerate(BLOCKS))

    def forward(self, grads: Sequence[torch.Tensor]) -> torch.Tensor:
        x, at = torch.zeros(()), 0
        for block, shapes in zip(self.blocks, BLOCKS, strict=True):
            x = block(x, grads[at : at + len(shapes)])
            at += len(shapes)
        return x


def gradients(batch: int, rank: int, size: int) -> list[torch.Tensor]:
    """Returns a rank's gradients of a batch: multiples of the number of ranks, so that means are integers."""
    generator = torch.Generator().manual_seed(1000 * batch + rank)
    return [size * torch.randint(-8, 9, shape, generator=generator).float() for shape in SHAPES]


@functools.cache
def expected(batches: tuple[tuple[int, ...], ...]) -> list[list[torch.Tensor]]:
    """Returns the weights after each step of torch.optim.AdamW. batches: for each step, the batch of each rank."""
    model = Model()
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, **OPTIONS)
    found = []
    for step in batches:
        each = [gradients(batch, rank, len(step)) for rank, batch in enumerate(step)]
        for i, p in enumerate(params):
            p.grad = torch.stack([grads[i] for grads in each]).sum(0) / len(step)
        optimizer.step()
        found.append([p.detach().clone() for p in params])
    return found


def local_weights(model: nn.Module) -> list[torch.Tensor]:
    """Returns copies of this rank's parameters, or of its shards."""
    return [(p.to_local() if hasattr(p, "to_local") else p).detach().clone() for p in model.parameters()]


def right(local: Sequence[torch.Tensor], whole: Sequence[torch.Tensor], rank: int, size: int) -> bool:
    """Whether a rank's local weights are those of `whole`. A wrong gradient would differ by 100 times the tolerance."""
    for mine, wanted in zip(local, whole, strict=True):
        if mine.shape != wanted.shape:  # FSDP2's shard
            chunks = wanted.chunk(size)
            wanted = chunks[rank] if rank < len(chunks) else wanted[:0]
        if not torch.allclose(mine, wanted, rtol=1e-5, atol=1e-5):
            return False
    return True
