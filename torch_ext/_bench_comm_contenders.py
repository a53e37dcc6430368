"""Who takes part in `bench comm`: by name, how to build a training loop over a process group, ours or a peer's."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from torch_ext._optimizer import AdamW
from torch_ext._parallel import parallelize
from torch_ext._policy import load_policy

_LR = 1e-4
_BATCH = 4  # rows: the layers' weights are read, and little is computed with them


class Size(NamedTuple):
    """Of the model: `layers` linear layers of width x width."""

    layers: int
    width: int


FULL, QUICK = Size(24, 628), Size(4, 64)  # 9.48 million parameters, and few


@dataclass(frozen=True)
class Task:
    """What every contender of a run does."""

    size: Size
    compute: float  # seconds slept in a backward, spread over the layers
    group: dist.ProcessGroup
    seed: int

    def model(self, dtype: torch.dtype) -> "Stack":
        torch.manual_seed(self.seed)
        return Stack(self.size, self.compute).to(dtype)


class _Pause(torch.autograd.Function):
    """Backward sleeps: compute that needs no core."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return grads[0], None


class Stack(nn.Module):
    """Many layers that communicate more than they compute."""

    def __init__(self, size: Size, compute: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size.width, size.width) for _ in range(size.layers))
        self._pause = compute / size.layers

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
            if self._pause:
                x = _Pause.apply(x, self._pause)
        return x.float().square().mean()


class Loop:
    """A training loop."""

    def __init__(self, task: Task, model: nn.Module, dtype: torch.dtype, optimizer: Any = None) -> None:
        generator = torch.Generator().manual_seed(task.seed + dist.get_rank(task.group))  # each rank has its own data
        self._x = torch.randn(_BATCH, task.size.width, generator=generator).to(dtype)
        self._model, self._optimizer = model, optimizer

    def step(self) -> None:
        self._model(self._x).backward()
        if self._optimizer is not None:
            self._optimizer.step()
        self._model.zero_grad()

    def finish(self) -> None:
        """Waits for what a step leaves to the next forward."""
        with torch.no_grad():
            self._model(self._x)

    @property
    def wire_bytes(self) -> int | None:
        """That this rank sent for the last reduction, by its own count; None of a peer."""
        count = getattr(self._model, "wire_bytes", None)
        return None if count is None else int(count())


def _alone(task: Task) -> Loop:
    return Loop(task, task.model(torch.bfloat16), torch.bfloat16)


def _ddp(task: Task, dtype: torch.dtype, megabytes: float | None = None) -> Loop:
    ddp = DistributedDataParallel(task.model(dtype), process_group=task.group, bucket_cap_mb=megabytes)
    return Loop(task, ddp, dtype)


def _zero(task: Task) -> Loop:
    ddp = DistributedDataParallel(task.model(torch.bfloat16), process_group=task.group)
    optimizer = ZeroRedundancyOptimizer(
        ddp.parameters(), optimizer_class=torch.optim.AdamW, process_group=task.group, lr=_LR, fused=True
    )
    return Loop(task, ddp, torch.bfloat16, optimizer)


def _fsdp2(task: Task) -> Loop:
    """fp32 shards, gathered in bf16, reduced in fp32."""
    model, mesh = task.model(torch.float32), DeviceMesh.from_group(task.group, "cpu")
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    return Loop(task, model, torch.bfloat16, torch.optim.AdamW(model.parameters(), lr=_LR, fused=True))


def _ours(task: Task, strategy: str, wire: str, step: bool) -> Loop:
    model = task.model(torch.bfloat16)
    policy = load_policy(model, override_ddp_config={"grad_comm_dtype": wire})
    parallelize(model, policy, strategy=strategy, process_group=task.group)
    return Loop(task, model, torch.bfloat16, AdamW(model.parameters(), lr=_LR, policy=policy) if step else None)


Make = Callable[[Task], Loop]

BUCKETS = {f"DDP bf16, {megabytes} MB": megabytes for megabytes in (1, 2, 4, 8, 25)}

PEERS: dict[str, Make] = {
    "alone": _alone,  # no exchange at all
    "DDP fp32": partial(_ddp, dtype=torch.float32),
    "DDP bf16": partial(_ddp, dtype=torch.bfloat16),
    **{name: partial(_ddp, dtype=torch.bfloat16, megabytes=cap) for name, cap in BUCKETS.items()},
    "ZeRO on DDP bf16": _zero,
    "FSDP2 fp32 reduction": _fsdp2,
}
OURS: dict[str, Make] = {
    "no_shard bf16": partial(_ours, strategy="no_shard", wire="bf16", step=False),
    "no_shard fp8": partial(_ours, strategy="no_shard", wire="fp8", step=False),
    "optim bf16": partial(_ours, strategy="optim", wire="bf16", step=True),
    "optim fp8": partial(_ours, strategy="optim", wire="fp8", step=True),
    "optim_grads_params bf16": partial(_ours, strategy="optim_grads_params", wire="bf16", step=True),
}
CONTENDERS = {**PEERS, **OURS}
