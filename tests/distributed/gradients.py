"""Models whose gradients are given numbers, and the policies of the tests."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

import torch_ext

BF16, FP32, FP16 = torch.bfloat16, torch.float32, torch.float16


class Given(torch.nn.Module):
    """Parameters p0, p1, ... whose gradients, after `model(grads).backward()`, are exactly `grads`."""

    def __init__(self, shapes: Sequence[Any], dtype: torch.dtype = FP32) -> None:
        super().__init__()
        for i, shape in enumerate(shapes):
            self.register_parameter(f"p{i}", torch.nn.Parameter(torch.zeros(shape, dtype=dtype)))

    def forward(self, grads: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """grads: one for each parameter; None leaves the parameter out of the loss."""
        terms = [(p * g.to(p.dtype)).sum() for p, g in zip(self.parameters(), grads, strict=True) if g is not None]
        return torch.stack(terms).sum()


def noise(seed: int, rank: int, shapes: Sequence[Any], dtype: torch.dtype = FP32) -> list[torch.Tensor]:
    """A common signal and noise of the rank's own, in dtype."""
    common = torch.Generator().manual_seed(seed)
    own = torch.Generator().manual_seed(1000 * seed + rank + 1)
    return [(torch.randn(s, generator=common) + torch.randn(s, generator=own)).to(dtype) for s in shapes]


def policy(
    param: torch.dtype = FP32, main: Any = None, wire: Any = None, loss_scale: float | None = None, **ddp: Any
) -> Any:
    """The policy of a model in `param`, gradients in `main`, wire in `wire`."""
    if wire is not None:
        ddp["grad_comm_dtype"] = wire
    optimizer: dict[str, Any] = {} if main is None else {"main_grads_dtype": main}
    if loss_scale is not None:
        optimizer["initial_loss_scale"] = loss_scale
    return torch_ext.load_policy(param, override_optimizer_config=optimizer, override_ddp_config=ddp)


def on_all_ranks(value: Any) -> list[Any]:
    """Every rank's value."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def bits(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    """The bytes of each tensor."""
    return [bytes(t.detach().contiguous().view(-1).view(torch.uint8).tolist()) for t in tensors]
