"""Models for FSDP2 whose gradients are given by the test, and the sums of gradients that the ranks must get."""

from collections.abc import Sequence
from typing import Any

import torch
from gradients import FP32, noise
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

RECOVERS = hasattr(FSDPModule, "reset_iter_state")
"""Whether FSDP2 can go on after a backward that raised within it (torch >= 2.13)."""
UNUSED_COUNT_AS_ZERO = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
"""Whether FSDP2 reduces a unit in which a parameter got no gradient (torch >= 2.13)."""

BLOCKS: list[list[Any]] = [[(5, 3), (1,), (7,)], [(4, 4)], [(2,), (9, 2), (130,)]]
"""Shapes by block: rows that no number of ranks divides, and fewer rows than ranks."""
OWN = (3,)  # the root module's own parameter
SHAPES = [OWN] + [shape for block in BLOCKS for shape in block]


class Block(torch.nn.Module):
    """Adds terms to x whose gradients are exactly `grads`; None leaves a parameter out of the loss."""

    def __init__(self, shapes: Sequence[Any], dtype: torch.dtype) -> None:
        super().__init__()
        for i, shape in enumerate(shapes):
            self.register_parameter(f"p{i}", torch.nn.Parameter(torch.zeros(shape, dtype=dtype)))

    def forward(self, x: torch.Tensor, grads: Sequence[torch.Tensor | None]) -> torch.Tensor:
        terms = [(p * g.to(p.dtype)).sum() for p, g in zip(self.parameters(), grads, strict=True) if g is not None]
        return x + sum(term.float() for term in terms)  # type: ignore[no-any-return]


class Blocks(torch.nn.Module):
    """A model with a parameter of its own and one block per entry of BLOCKS; `model(grads).backward()` sets the
    gradients to `grads`."""

    def __init__(self, dtype: torch.dtype = FP32) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(shapes, dtype) for shapes in BLOCKS)
        self.own = torch.nn.Parameter(torch.zeros(OWN, dtype=dtype))

    def forward(self, grads: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """grads: one for each of SHAPES; None leaves the parameter out of the loss."""
        x, at = torch.zeros((), requires_grad=True), 1
        for block, shapes in zip(self.blocks, BLOCKS, strict=True):
            x = block(x, grads[at : at + len(shapes)])
            at += len(shapes)
        return x if grads[0] is None else x + (self.own * grads[0].to(self.own.dtype)).sum().float()


def shard_of(param: DTensor, whole: torch.Tensor) -> torch.Tensor:
    """Returns this rank's rows of `whole`, a tensor with the parameter's shape."""
    index = next(i for i, placement in enumerate(param.placements) if placement.is_shard())
    rank, size = param.device_mesh.get_local_rank(index), param.device_mesh.size(index)
    rows = -(-whole.shape[0] // size)
    return whole[rows * rank : rows * (rank + 1)]


def mean_of_ranks(seed: int, ranks: Sequence[int], dtypes: Any, factor: float | None = None) -> list[torch.Tensor]:
    """Returns the mean that the ranks must get: the sum of what they send, in fp32 and in rank order, divided in fp32.

    dtypes: of the gradients, the main gradients and the wire. factor: the divisor; None: the number of ranks."""
    narrow = dtypes[2] if len(ranks) > 1 and dtypes[2].itemsize < dtypes[0].itemsize else dtypes[0]
    sent = [[grad.to(narrow).float() for grad in noise(seed, rank, SHAPES, dtypes[0])] for rank in ranks]
    sums = sent[0]
    for of_rank in sent[1:]:
        sums = [a + b for a, b in zip(sums, of_rank, strict=True)]
    scale = torch.tensor(1.0 / (factor or len(ranks)), dtype=FP32)
    return [a * scale for a in sums]


def accumulated(means: Sequence[Sequence[torch.Tensor]], main: torch.dtype) -> list[torch.Tensor]:
    """Returns the micro-batches' means added up in dtype `main`: each addition is in fp32 and rounded once."""
    total = [mean.to(main) for mean in means[0]]
    for of_batch in means[1:]:
        total = [(a.float() + b).to(main) for a, b in zip(total, of_batch, strict=True)]
    return total
