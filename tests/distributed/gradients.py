"""Models whose gradients are given by the test, policies for tests, and the gradients that an optimizer reads."""

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
    """Returns one gradient per shape in `dtype`: a signal common to all ranks plus noise of this rank."""
    common = torch.Generator().manual_seed(seed)
    own = torch.Generator().manual_seed(1000 * seed + rank + 1)
    return [(torch.randn(s, generator=common) + torch.randn(s, generator=own)).to(dtype) for s in shapes]


def policy(
    param: torch.dtype = FP32, main: Any = None, wire: Any = None, loss_scale: float | None = None, **ddp: Any
) -> Any:
    """Returns the policy of a model in dtype `param`, with main gradients in `main` and `wire` on the wire."""
    if wire is not None:
        ddp["grad_comm_dtype"] = wire
    optimizer: dict[str, Any] = {} if main is None else {"main_grads_dtype": main}
    if loss_scale is not None:
        optimizer["initial_loss_scale"] = loss_scale
    return torch_ext.load_policy(param, override_optimizer_config=optimizer, override_ddp_config=ddp)


def _reader(model: torch.nn.Module) -> torch_ext.AdamW:
    """Returns an optimizer whose exp_avg are the gradients, after a step that changed no weight (lr=0).

    With betas of 0, exp_avg = g + 0 * (m - g) is g to the bit. m starts at -1, so that the sign of a zero in g stays,
    and so that -1 everywhere means that a parameter got no gradient.
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
    """Returns the gradient of each parameter as this rank's optimizer reads it, widened to fp32; None if there is none.

    A sharded parameter gives this rank's shard, flat under our own strategies. Collective: it takes an optimizer step.
    """
    optimizer = _reader(model)
    entries = [optimizer.state[p] for p in model.parameters()]
    return [entry["exp_avg"] if entry.get("step", 0) > 0 else None for entry in entries]


def gradient(model: torch.nn.Module, param: torch.Tensor) -> torch.Tensor | None:
    """Returns the element of `gradients(model)` that belongs to `param`, flat."""
    grad = next(g for p, g in zip(model.parameters(), gradients(model), strict=True) if p is param)
    return None if grad is None else grad.reshape(-1)


def whole_gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    """Returns the whole gradients, put together from the optimizers of all ranks, on every rank; -1 in all elements
    where a parameter has no gradient."""
    entries = _reader(model).consolidate_state_dict(to=None)["state"]
    return [entries[i]["exp_avg"] for i in range(len(entries))]


def on_all_ranks(value: Any) -> list[Any]:
    """Returns the list of every rank's value, on every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def bits(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    """Returns the bytes of each tensor."""
    return [bytes(t.detach().contiguous().view(-1).view(torch.uint8).tolist()) for t in tensors]
