"""What other people's code does to models that were parallelized: clipping by torch's functions, torch's loss scale,
and wrapping in DDP.

Where a strategy shards gradients `.grad` is None, or this rank's own. A norm taken of it would be another one on each
rank, or zero, and nothing would be clipped without a word. Frameworks call torch's functions and have no place to ask
for others, so these functions see to such parameters from the first sharded `parallelize` on; all others they treat as
before. torch's GradScaler refuses such parameters from then on.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from torch_ext.grads.errors import FOREIGN_SCALER
from torch_ext.optim import torch_clip_functions
from torch_ext.optim.torch_clip_functions import ROUTED
from torch_ext.params import reducer_registry

Function: TypeAlias = Callable[..., Any]


def find_shards() -> None:
    """From here on torch.nn.utils.clip_grad_norm_ and clip_grad_value_ find sharded gradients, and torch's own loss
    scale refuses them. Again and again is as good as once."""
    torch_clip_functions.route()
    for name in ("unscale_", "step"):
        method = getattr(torch.amp.GradScaler, name)
        if not hasattr(method, ROUTED):
            setattr(torch.amp.GradScaler, name, _refusing(method))


def settle_before_zeroing() -> None:
    """From here on zero_grad(set_to_none=False) of optimizers and modules waits for sums that a backward which raised
    left on their way: they would be written to what is zero then. Again and again is as good as once."""
    for owner, params_of in ((torch.optim.Optimizer, _of_optimizer), (torch.nn.Module, torch.nn.Module.parameters)):
        if not hasattr(owner.zero_grad, ROUTED):
            owner.zero_grad = _settling(owner.zero_grad, params_of)  # type: ignore[method-assign]


def _of_optimizer(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _settling(method: Function, params_of: Callable[[Any], Iterable[Tensor]]) -> Function:
    @functools.wraps(method)
    def zero_grad(self: Any, set_to_none: bool = True) -> Any:
        if not set_to_none:
            for owner in reducer_registry.owners_of(params_of(self)):
                owner.finish_failed_backward()
        return method(self, set_to_none)

    setattr(zero_grad, ROUTED, True)
    return zero_grad


def _refusing(method: Function) -> Function:
    """A method of torch.amp.GradScaler; ours has its own."""

    @functools.wraps(method)
    def function(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **options: Any) -> Any:
        params = _of_optimizer(optimizer)
        if scaler.is_enabled() and any(owner.sharded for owner in reducer_registry.owners_of(params)):
            raise RuntimeError(FOREIGN_SCALER)
        return method(scaler, optimizer, *args, **options)

    setattr(function, ROUTED, True)
    return function


def refuse_ddp(outer: torch.nn.Module, _name: str, inner: torch.nn.Module | None) -> None:
    """A hook of `register_module_module_registration_hook`: RuntimeError where gradients would be reduced twice."""
    if isinstance(outer, DistributedDataParallel) and inner is not None:
        for name, param in inner.named_parameters():
            if reducer_registry.owner_of(param) is not None:
                raise RuntimeError(
                    f"DistributedDataParallel around a model that was parallelized (parameter {name!r}): both would "
                    "reduce its gradients. Keep one of them: leave out parallelize and call "
                    "torch_ext.register_comm_hook(ddp, policy) on what the framework wrapped, or hand it the model "
                    "without a wrapper (Accelerate: prepare_model(model, evaluation_mode=True)) and then parallelize it"
                )
