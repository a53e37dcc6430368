"""The contenders of `bench comm`: by name, functions that build a training loop over a process group, ours or a
peer's."""

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

from torch_ext.optim.adamw import AdamW
from torch_ext.parallel.ddp_comm_hook import CommHook, register_comm_hook
from torch_ext.parallel.parallelize import parallelize
from torch_ext.policy.loader import load_policy

_LR = 1e-4


class Size(NamedTuple):
    """The size of the model: `layers` layers, each with a weight of width x width and a bias."""

    layers: int
    width: int

    @property
    def parameters(self) -> int:
        return self.layers * self.width * (self.width + 1)


FULL, QUICK = Size(24, 628), Size(4, 64)  # 9.48 million parameters, and few


@dataclass(frozen=True)
class Task:
    """The task that all contenders of a run have in common."""

    size: Size
    compute: float  # seconds slept in a backward, spread over the layers
    group: dist.ProcessGroup
    seed: int

    def model(self, dtype: torch.dtype) -> "Stack":
        """Returns the model. Its weights are the same on all ranks, its gradients are the rank's own."""
        generator = torch.Generator().manual_seed(self.seed + dist.get_rank(self.group))
        grads = [torch.randn(shape, generator=generator) for shape in _shapes(self.size.width)]
        torch.manual_seed(self.seed)
        return Stack(self.size, [grad.to(dtype) for grad in grads], self.compute).to(dtype)


def _shapes(width: int) -> list[tuple[int, ...]]:
    return [(width, width), (width,)]


class _Apply(torch.autograd.Function):
    """The identity, with parameters. Its backward sleeps, which simulates computation without using a core, and returns
    the given gradients of the parameters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: "_Layer", *params: Tensor) -> Tensor:
        ctx.layer, ctx.dtypes = layer, [p.dtype for p in params]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        layer: _Layer = ctx.layer
        if layer.pause:
            time.sleep(layer.pause)
        return grads[0], None, *(g.to(dtype, copy=True) for g, dtype in zip(layer.grads, ctx.dtypes, strict=True))


class _Layer(nn.Module):
    """A layer with a weight and a bias whose gradients are given."""

    def __init__(self, width: int, grads: list[Tensor], pause: float) -> None:
        super().__init__()
        self.weight, self.bias = (nn.Parameter(0.02 * torch.randn(shape)) for shape in _shapes(width))
        self.grads, self.pause = grads, pause

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Apply.apply(x, self, self.weight, self.bias)
        return out


class Stack(nn.Module):
    """Layers whose gradients are only copied, so that a step consists of the exchange and the sleep."""

    def __init__(self, size: Size, grads: list[Tensor], compute: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(size.width, grads, compute / size.layers) for _ in range(size.layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


class Loop:
    """A training loop of a contender."""

    def __init__(self, model: nn.Module, optimizer: Any = None) -> None:
        self._x = torch.zeros(1, requires_grad=True)
        self._model, self._optimizer = model, optimizer
        self._sent_before = 0

    def step(self) -> None:
        if self._optimizer is None:  # no step() ends torch_ext's count
            self._sent_before = self.counted() or 0
        self._model(self._x).backward()
        if self._optimizer is not None:
            self._optimizer.step()
        self._model.zero_grad()

    def finish(self) -> None:
        """Waits for work that a step leaves to the next forward, by running a forward."""
        with torch.no_grad():
            self._model(self._x)

    @property
    def wire_bytes(self) -> int | None:
        """The bytes that this rank sent in the last step, by torch_ext's own count; None for a peer."""
        counted = self.counted()
        return None if counted is None else counted - self._sent_before

    def counted(self) -> int | None:
        """Returns torch_ext's own count of bytes; None for a peer."""
        count = getattr(self._model, "wire_bytes", None)
        return None if count is None else int(count())


def _own_group() -> dist.ProcessGroup:
    """Returns a process group of this rank alone. Every rank has to call it."""
    group = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    assert isinstance(group, dist.ProcessGroup)
    return group


def _alone(task: Task) -> Loop:
    return Loop(task.model(torch.bfloat16))


def _ddp(task: Task, dtype: torch.dtype, megabytes: float | None = None) -> Loop:
    ddp = DistributedDataParallel(task.model(dtype), process_group=task.group, bucket_cap_mb=megabytes)
    return Loop(ddp)


def _zero(task: Task) -> Loop:
    """DistributedDataParallel with torch's ZeroRedundancyOptimizer."""
    ddp = DistributedDataParallel(task.model(torch.bfloat16), process_group=task.group)
    optimizer = ZeroRedundancyOptimizer(
        ddp.parameters(), optimizer_class=torch.optim.AdamW, process_group=task.group, lr=_LR, fused=True
    )
    return Loop(ddp, optimizer)


def _fsdp2(task: Task) -> Loop:
    """Plain FSDP2: fp32 shards, gathered in bf16, reduced in fp32."""
    model, mesh = task.model(torch.float32), DeviceMesh.from_group(task.group, "cpu")
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    return Loop(model, torch.optim.AdamW(model.parameters(), lr=_LR, fused=True))


def _ours(
    task: Task,
    strategy: str,
    wire: str,
    gather: str | None = None,
    compression: str | None = None,
    one_rank: bool = False,
) -> Loop:
    """Returns a loop with torch_ext.parallelize. gather: the dtype in which no_shard gathers its sums; compression: the
    policy's grad_comm_compression; None: the defaults. one_rank: each rank is a process group of its own. The
    optimizer's step is part of the loop if its state is sharded."""
    model = task.model(torch.bfloat16)
    ddp = {"grad_comm_dtype": wire, "grad_gather_dtype": gather, "grad_comm_compression": compression}
    policy = load_policy(model, override_ddp_config=ddp)
    parallelize(model, policy, strategy=strategy, process_group=_own_group() if one_rank else task.group)
    sharded = strategy != "no_shard"
    return Loop(model, AdamW(model.parameters(), lr=_LR, policy=policy) if sharded else None)


class _HookLoop(Loop):
    """A loop with DistributedDataParallel whose communication hook counts the bytes."""

    def __init__(self, ddp: DistributedDataParallel, hook: CommHook) -> None:
        super().__init__(ddp)
        self._hook = hook

    def counted(self) -> int:
        return self._hook.wire_bytes()


def _hook(task: Task, compression: str | None = None) -> Loop:
    """Stock DistributedDataParallel with our reduction as its communication hook."""
    ddp = DistributedDataParallel(task.model(torch.bfloat16), process_group=task.group)
    policy = load_policy(
        ddp.module, override_ddp_config={"grad_comm_dtype": "bf16", "grad_comm_compression": compression}
    )
    return _HookLoop(ddp, register_comm_hook(ddp, policy))


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
    "no_shard bf16": partial(_ours, strategy="no_shard", wire="bf16"),
    "no_shard bf16, as it is": partial(_ours, strategy="no_shard", wire="bf16", compression="off"),
    "no_shard bf16, compressed": partial(_ours, strategy="no_shard", wire="bf16", compression="on"),
    "optim bf16, compressed": partial(_ours, strategy="optim", wire="bf16", compression="on"),
    "hook bf16": _hook,
    "hook bf16, as it is": partial(_hook, compression="off"),
    "hook bf16, compressed": partial(_hook, compression="on"),
    "no_shard fp8": partial(_ours, strategy="no_shard", wire="fp8", gather="fp8"),
    "no_shard fp8, bf16 sums": partial(_ours, strategy="no_shard", wire="fp8"),
    "optim bf16": partial(_ours, strategy="optim", wire="bf16"),
    "optim bf16, as it is": partial(_ours, strategy="optim", wire="bf16", compression="off"),
    "optim fp8": partial(_ours, strategy="optim", wire="fp8"),
    "optim_grads_params bf16": partial(_ours, strategy="optim_grads_params", wire="bf16"),
}
ONE_RANK: dict[str, Make] = {
    f"{strategy}, one rank": partial(_ours, strategy=strategy, wire="bf16", one_rank=True)
    for strategy in ("no_shard", "optim", "optim_grads_params")
}
"""A rank's own work without exchange. All ranks do it at the same time, so that they share the processors."""

CONTENDERS = {**PEERS, **OURS, **ONE_RANK}
