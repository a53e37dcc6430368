"""Optimizers shaped like those of libraries that need GPUs or clusters: the same attributes, and steps that do the same
to weights and state."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

BF16, FP32 = torch.bfloat16, torch.float32


def is_wide(p: Tensor) -> bool:
    return p.dtype == FP32


class Float16Optimizer:
    """Megatron-LM's: the groups of a torch optimizer hold fp32 masters of the 16-bit weights."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.float16_groups: list[list[Tensor]] = []
        self.fp32_from_float16_groups: list[list[Tensor]] = []
        self.fp32_from_fp32_groups: list[list[Tensor]] = []
        for group in optimizer.param_groups:
            narrow = [p for p in group["params"] if not is_wide(p)]
            masters = {p: p.detach().clone().float() for p in narrow}
            self.float16_groups.append(narrow)
            self.fp32_from_float16_groups.append(list(masters.values()))
            self.fp32_from_fp32_groups.append([p for p in group["params"] if is_wide(p)])
            group["params"] = [masters.get(p, p) for p in group["params"]]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Returns each 16-bit weight with its fp32 master."""
        weights = [p for group in self.float16_groups for p in group]
        return list(zip(weights, [m for group in self.fp32_from_float16_groups for m in group], strict=True))

    def step(self) -> None:
        for weight, master in self.pairs():
            master.grad = None if weight.grad is None else weight.grad.float()
        self.optimizer.step()
        for weight, master in self.pairs():
            weight.data.copy_(master)

    def zero_grad(self) -> None:
        for p in [p for groups in (self.float16_groups, self.fp32_from_fp32_groups) for group in groups for p in group]:
            p.grad = None


class DistributedOptimizer:
    """Megatron-LM's: this rank's elements of each parameter, as views, and fp32 masters of those elements."""

    def __init__(self, params: Sequence[Tensor], ranges: Sequence[tuple[int, int]], **options: Any) -> None:
        self.model_float16_groups = [list(params)]
        self.shard_float16_groups = [[p.detach().view(-1)[a:b] for p, (a, b) in zip(params, ranges, strict=True)]]
        self.shard_fp32_from_float16_groups = [[s.clone().float() for s in self.shard_float16_groups[0]]]
        self.optimizer = torch.optim.AdamW(self.shard_fp32_from_float16_groups[0], **options)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups


class ChainedOptimizer:
    """Megatron-LM's: several optimizers in one, for dense parameters and for experts."""

    def __init__(self, optimizers: Iterable[Any]) -> None:
        self.chained_optimizers = list(optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for one in self.chained_optimizers for group in one.param_groups]


class HybridDeviceOptimizer(torch.optim.Optimizer):
    """Megatron-LM's: the first `offloaded` parameters are stepped as fp32 copies on the host, by separate
    optimizers."""

    def __init__(self, params: Iterable[Tensor], offloaded: int, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.param_to_fp32_param: dict[Tensor, Tensor] = {}
        self.gpu_params_map_cpu_copy: dict[Tensor, Tensor] = {}
        for i, p in enumerate(self.param_groups[0]["params"]):
            copy = p.detach().clone().float()
            if not is_wide(p):
                self.param_to_fp32_param[p] = copy
            if i < offloaded:
                self.gpu_params_map_cpu_copy[p] = copy
        copies = self.param_to_fp32_param | self.gpu_params_map_cpu_copy
        self.inner = [copies.get(p, p) for p in self.param_groups[0]["params"]]
        self.cpu_optimizers = [torch.optim.AdamW([copy], lr=lr) for copy in self.inner[:offloaded]]
        self.gpu_optimizer = torch.optim.AdamW(self.inner[offloaded:], lr=lr)

    @property
    def sub_optimizers(self) -> list[torch.optim.Optimizer]:
        return [*self.cpu_optimizers, self.gpu_optimizer]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        all_params = self.param_groups[0]["params"]
        for p, copy in zip(all_params, self.inner, strict=True):
            copy.grad = None if p.grad is None else p.grad.to(copy.dtype)
        for one in self.sub_optimizers:
            one.step()
        for p, copy in zip(all_params, self.inner, strict=True):
            p.data.copy_(copy)


class FlatPartitions:
    """DeepSpeed's stages 1 and 2: the weights of a group are in one buffer, and each rank steps a part of it in
    fp32."""

    def __init__(self, params: Sequence[nn.Parameter], padding: int = 3, **options: Any) -> None:
        flat = torch.cat([p.detach().view(-1) for p in params] + [torch.zeros(padding, dtype=params[0].dtype)])
        at = 0
        for p in params:
            p.data = flat[at : at + p.numel()].view(p.shape)
            at += p.numel()
        self.bit16_groups = [list(params)]
        self.bit16_groups_flat = [flat]
        self.parallel_partitioned_bit16_groups = [[flat]]
        self.single_partition_of_fp32_groups = [flat.clone().float().requires_grad_()]
        self.optimizer = torch.optim.AdamW(self.single_partition_of_fp32_groups, **options)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups


class FusedAdam(torch.optim.Optimizer):
    """Transformer Engine's: fp32 state for 16-bit parameters, with master_param in it if master_weights is set.

    ignores: dtypes of parameters that get no master even then.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        master_weights: bool = False,
        exp_avg_sq_dtype: torch.dtype = FP32,
        ignores: Sequence[torch.dtype] = (),
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": 1e-8, "weight_decay": 0.0, "bias_correction": True}
        super().__init__(params, defaults)
        self.master_weights, self.ignores = master_weights, ignores
        self.exp_avg_dtype, self.exp_avg_sq_dtype = FP32, exp_avg_sq_dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    self._step(p, group)

    def _step(self, p: Tensor, group: Mapping[str, Any]) -> None:
        state, (one, two) = self.state[p], group["betas"]
        if not state:
            state["exp_avg"] = torch.zeros_like(p, dtype=FP32)
            state["exp_avg_sq"] = torch.zeros_like(p, dtype=self.exp_avg_sq_dtype)
            if self.master_weights and not is_wide(p) and p.dtype not in self.ignores:
                state["master_param"] = p.detach().clone().float()
        assert p.grad is not None
        grad = p.grad.float()
        state["exp_avg"].lerp_(grad, 1 - one)
        state["exp_avg_sq"].copy_(state["exp_avg_sq"].float() * two + grad * grad * (1 - two))
        m, v = state["exp_avg"] / (1 - one ** group["step"]), state["exp_avg_sq"].float() / (1 - two ** group["step"])
        master = state.get("master_param", p.detach().float())
        master -= group["lr"] * m / (v.sqrt() + group["eps"])
        p.copy_(master)


class MastersInGroups(torch.optim.Optimizer):
    """apex's FusedAdam(master_weights=True): masters are in groups of their own, param_groups_master."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0})
        self.param_groups_master = [
            {"params": [p.detach().clone().float() for p in group["params"]]} for group in self.param_groups
        ]


class EightBitAdam(torch.optim.Optimizer):
    """bitsandbytes': 8-bit codes, a table of the codes' values, and the greatest magnitude of each block of 256
    elements."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0})

    def set_state(self, p: Tensor, m: Tensor, v: Tensor, steps: int) -> None:
        """Sets the moments, each encoded to the nearest of a table of 256 values."""
        state = self.state[p]
        state["step"] = steps
        for n, values, low in (("1", m, -1.0), ("2", v, 0.0)):
            flat = values.reshape(-1)
            blocks = flat.split(256)
            absmax = torch.stack([block.abs().max() for block in blocks])
            table = torch.linspace(low, 1, 256)
            unit = flat / absmax.repeat_interleave(256)[: flat.numel()]
            codes = (unit[:, None] - table).abs().argmin(1)
            state[f"state{n}"], state[f"qmap{n}"] = codes.to(torch.uint8).view(p.shape), table
            state[f"absmax{n}"] = absmax


def model_of(dtype: torch.dtype = BF16, seed: int = 0, width: int = 24) -> nn.Sequential:
    """Returns two linear layers with a GELU and a norm in between: weights of about 0.1, and some that are 1."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, 6)).to(dtype)


def train(model: nn.Module, optimizer: Any, steps: int = 3, seed: int = 1) -> None:
    """Takes steps with random gradients and drops the gradients."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for p in model.parameters():
            if p.requires_grad:
                p.grad = (torch.randn(p.shape, generator=generator) * 0.1).to(p.dtype)
        optimizer.step()
        for p in model.parameters():
            p.grad = None
