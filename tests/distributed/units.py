"""Models for FSDP2: blocks whose gradients are given numbers, and what the sum of the ranks' gradients should be."""

from collections.abc import Sequence
from typing import Any

import torch
from gradients import FP32, noise
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

RECOVERS = hasattr(FSDPModule, "reset_iter_state")
"""Whether FSDP2 can go on after a backward that raised within it (torch >= 2.13)."""
UNUSED_COUNT_AS_ZERO = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
"""Whether it reduces units of which a parameter got no gradient (torch >= 2.13)."""

BLOCKS: list[list[Any]] = [[(5, 3), (1,), (7,)], [(4, 4)], [(2,), (9, 2), (130,)]]
"""Rows that no number of ranks divides, and fewer rows than ranks."""
OWN = (3,)
SHAPES = [OWN] + [shape for block in BLOCKS for shape in block]


class Block(torch.nn.Module):
    def __init__(self, shapes: Sequence[Any], dtype: torch.dtype) -> None:
        super().__init__()
        for i, shape in enumerate(shapes):
            self.register_parameter(f"p{i}", torch.nn.Parameter(torch.zeros(shape, dtype=dtype)))

    def forward(self, x: torch.Tensor, grads: Sequence[torch.Tensor | None]) -> torch.Tensor:
        terms = [(p * g.to(p.dtype)).sum() for p, g in zip(self.parameters(), grads, strict=True) if g is not None]
        return x + sum(term.float() for term in terms)  # type: ignore[no-any-return]


class Blocks(torch.nn.Module):
    """Parameters of SHAPES, one of its own and the rest in blocks; `model(grads).backward()` gives them `grads`."""

    def __init__(self, dtype: torch.dtype = FP32) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(shapes, dtype) for shapes in BLOCKS)
        self.own = torch.nn.Parameter(torch.zeros(OWN, dtype=dtype))

    def forward(self, grads: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """grads: of SHAPES; None leaves a parameter out of the loss."""
        x, at = torch.zeros((), requires_grad=True), 1
        for block, shapes in zip(self.blocks, BLOCKS, strict=True):
            x = block(x, grads[at : at + len(shapes)])
            at += len(shapes)
        return x if grads[0] is None else x + (self.own * grads[0].to(self.own.dtype)).sum().float()


def shard_of(param: DTensor, whole: torch.Tensor) -> torch.Tensor:
    """This rank's elements of a tensor that is shaped as the parameter, which is cut along its rows."""
    index = next(i for i, placement in enumerate(param.placements) if placement.is_shard())
    rank, size = param.device_mesh.get_local_rank(index), param.device_mesh.size(index)
    rows = -(-whole.shape[0] // size)
    return whole[rows * rank : rows * (rank + 1)]


def mean_of_ranks(seed: int, ranks: Sequence[int], dtypes: Any, factor: float | None = None) -> list[torch.Tensor]:
    """The sum of what the ranks send, in fp32 and in their order, divided in fp32. dtypes: of gradients, ..., wire."""
    narrow = dtypes[2] if len(ranks) > 1 and dtypes[2].itemsize < dtypes[0].itemsize else dtypes[0]
    sent = [[grad.to(narrow).float() for grad in noise(seed, rank, SHAPES, dtypes[0])] for rank in ranks]
    sums = sent[0]
    for of_rank in sent[1:]:
        sums = [a + b for a, b in zip(sums, of_rank, strict=True)]
    scale = torch.tensor(1.0 / (factor or len(ranks)), dtype=FP32)
    return [a * scale for a in sums]


def accumulated(means: Sequence[Sequence[torch.Tensor]], main: torch.dtype) -> list[torch.Tensor]:
    """The micro-batches' means, added up in main: each addition in fp32, rounded once."""
    total = [mean.to(main) for mean in means[0]]
    for of_batch in means[1:]:
        total = [(a.float() + b).to(main) for a, b in zip(total, of_batch, strict=True)]
    return total
