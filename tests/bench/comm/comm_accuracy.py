"""The error of the gradient that the optimizer reads, after several micro-batches on several ranks.

The gradients of all micro-batches and ranks are given, so that every rank can compute the exact result: the float64
mean over ranks of the float64 sum over micro-batches.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torch_ext.optim.adamw import AdamW
from torch_ext.parallel.parallelize import parallelize
from torch_ext.policy.loader import load_policy

_PER_RANK = 1 << 16  # elements: whole blocks, so that rank r's shard is the r-th part of the parameter


class _Given(nn.Module):
    """A module with one parameter, whose gradient is the argument of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(_PER_RANK * dist.get_world_size(), dtype=torch.bfloat16))

    def forward(self, grad: Tensor) -> Tensor:
        return (self.weight * grad).sum()


def measure(name: str, seed: int, group: dist.ProcessGroup) -> float:
    """Returns the relative error (root mean square) of a contender, the same on every rank."""
    make, micro_batches = CONTENDERS[name]
    grads = [[_gradient(seed, i, rank) for i in range(micro_batches)] for rank in range(dist.get_world_size())]
    exact = sum(grad.double() for of_rank in grads for grad in of_rank) / len(grads)
    assert isinstance(exact, Tensor)
    begin, found = make(grads[dist.get_rank()], group)
    part = exact[begin : begin + found.numel()]
    own = (float((found.double() - part).square().sum()), float(part.square().sum()))
    sums: list[tuple[float, float]] = [own] * dist.get_world_size()
    dist.all_gather_object(sums, own)
    return math.sqrt(sum(error for error, _ in sums) / sum(size for _, size in sums))


def _gradient(seed: int, micro_batch: int, rank: int) -> Tensor:
    """Returns a rank's gradient of a micro-batch: a signal that is the same on all ranks, plus noise of the rank."""
    elements = _PER_RANK * dist.get_world_size()
    common = torch.Generator().manual_seed(1000 * seed + micro_batch)
    own = torch.Generator().manual_seed(10**6 * (rank + 1) + 1000 * seed + micro_batch)
    return (torch.randn(elements, generator=common) + torch.randn(elements, generator=own)).bfloat16()


def _accumulate(model: Any, grads: list[Tensor]) -> None:
    """Runs a backward for each micro-batch. model: a parallelized one or DDP, which have the same methods."""
    for grad in grads[:-1]:
        with model.no_sync():
            model(grad).backward()
    model(grads[-1]).backward()


def _ddp(grads: list[Tensor], group: dist.ProcessGroup) -> tuple[int, Tensor]:
    """Returns 0 and DistributedDataParallel's gradient, which every rank has whole."""
    model = _Given()
    ddp = DistributedDataParallel(model, process_group=group)
    _accumulate(ddp, grads)
    assert model.weight.grad is not None
    return 0, model.weight.grad


def _ours(grads: list[Tensor], group: dist.ProcessGroup, strategy: str) -> tuple[int, Tensor]:
    """Returns where this rank's part of the parameter begins, and the gradient that the optimizer reads there. With
    beta1 = 0 its first moment is that gradient."""
    model = _Given()
    policy = load_policy(
        model,
        override_optimizer_config={"main_grads_dtype": "fp32", "exp_avg_dtype": "fp32"},
        override_ddp_config={"grad_comm_dtype": "bf16"},
    )
    parallelize(model, policy, strategy=strategy, process_group=group)
    optimizer = AdamW(model.parameters(), lr=0.0, betas=(0.0, 0.999), policy=policy)
    _accumulate(model, grads)
    optimizer.step()
    return dist.get_rank() * _PER_RANK, optimizer.state[model.weight]["exp_avg"].flatten()


# (the micro-batches' gradients, the group) -> the first element of this rank's result, and the result.
Make = Callable[[list[Tensor], dist.ProcessGroup], tuple[int, Tensor]]

_OPTIM: Make = partial(_ours, strategy="optim")

# Name -> the contender's function, and its number of micro-batches.
CONTENDERS: dict[str, tuple[Make, int]] = {
    "optim, 1 micro-batch": (_OPTIM, 1),
    "optim, 16 micro-batches": (_OPTIM, 16),
    "DDP bf16, 16 micro-batches": (_ddp, 16),
}
