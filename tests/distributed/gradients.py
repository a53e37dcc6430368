"""Models whose gradients are given numbers, the policies of the tests, and what an optimizer reads as gradients."""

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


def _reader(model: torch.nn.Module) -> torch_ext.AdamW:
    """An optimizer that read the gradients into its first moments, in a step that changes no weight. m = g + 0 (m - g)
    is g to the bit: m begins as -1, beside which the sign of a zero stays.
    """
    params = list(model.parameters())
    moments = {"main_params_dtype": None, "exp_avg_dtype": "fp32", "exp_avg_sq_dtype": "fp32"}
    chosen = torch_ext.load_policy(
        params[0].dtype, override_optimizer_config={**moments, "use_precision_aware_optimizer": True}
    )
    optimizer = torch_ext.AdamW(params, lr=0.0, betas=(0.0, 0.0), weight_decay=0.0, policy=chosen)
    optimizer.state_dict()
    for state in optimizer.state.values():
        state["exp_avg"].fill_(-1.0)
    optimizer.step()
    return optimizer


def gradients(model: torch.nn.Module) -> list[torch.Tensor | None]:
    """What this rank's optimizer reads as the gradient of each parameter, widened to fp32: of a sharded one this rank's
    part, flat under our own strategies. None where it has none. To be called by all ranks, whose step it is.
    """
    optimizer = _reader(model)
    entries = [optimizer.state[p] for p in model.parameters()]
    return [entry["exp_avg"] if entry.get("step", 0) > 0 else None for entry in entries]


def gradient(model: torch.nn.Module, param: torch.Tensor) -> torch.Tensor | None:
    """One of `gradients`, flat."""
    grad = next(g for p, g in zip(model.parameters(), gradients(model), strict=True) if p is param)
    return None if grad is None else grad.reshape(-1)


def whole_gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    """What the optimizers of all ranks read, put together, on all ranks; -1 where a parameter has no gradient."""
    entries = _reader(model).consolidate_state_dict(to=None)["state"]
    return [entries[i]["exp_avg"] for i in range(len(entries))]


def on_all_ranks(value: Any) -> list[Any]:
    """Every rank's value."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def bits(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    """The bytes of each tensor."""
    return [bytes(t.detach().contiguous().view(-1).view(torch.uint8).tolist()) for t in tensors]
