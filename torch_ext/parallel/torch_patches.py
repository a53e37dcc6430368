"""Hooks and patches by which other packages' code does the right thing with models that were parallelized, or raises.

Note: what torch has a public hook for, and what it has not

An optimizer's step (`register_optimizer_step_pre_hook`) and DistributedDataParallel around a model
(`register_module_module_registration_hook`) have public hooks. Three things have none, and are patched for the process,
from the first call of `parallelize` that needs it; parameters that no reducer of ours has are treated as before:

- torch.nn.utils.clip_grad_norm_ and clip_grad_value_, sharded strategies (optim/torch_clip_functions.py): `.grad` is
  None there, or this rank's own. A norm of it would differ from rank to rank, or be zero, and nothing would be clipped
  without an error. Frameworks call these functions and take no others.
- torch.amp.GradScaler.unscale_, sharded strategies: it would unscale what is in `.grad`, and step, or skip the step, by
  what this rank found there. (Where torch_ext's optimizers unscale in their step, step() refuses this scaler itself.)
- zero_grad(set_to_none=False) of optimizers and modules: sums that a backward which raised left under way would be
  written to what is zero then, so it waits for them.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torch_ext.grads.errors import FOREIGN_SCALER
from torch_ext.optim import torch_clip_functions
from torch_ext.optim.adamw import Adam
from torch_ext.optim.torch_clip_functions import ROUTED
from torch_ext.params import param_groups, reducer_registry

Function: TypeAlias = Callable[..., Any]

_installed = False


def install(sharded: bool) -> None:
    """From here on; sharded: what sharded strategies need, too. Calling it again changes nothing."""
    global _installed
    if not _installed:
        _installed = True
        register_optimizer_step_pre_hook(_before_step)
        register_module_module_registration_hook(_refuse_ddp)
        _patch(torch.optim.Optimizer, "zero_grad", functools.partial(_wait_for_failed_backward, params_of=_params_of))
        _patch(
            torch.nn.Module,
            "zero_grad",
            functools.partial(_wait_for_failed_backward, params_of=torch.nn.Module.parameters),
        )
    if sharded:
        torch_clip_functions.route()
        _patch(torch.amp.GradScaler, "unscale_", _refuse_sharded)


def _patch(owner: type, name: str, patched: Callable[[Function], Function]) -> None:
    method = getattr(owner, name)
    if not hasattr(method, ROUTED):
        function = functools.wraps(method)(patched(method))
        setattr(function, ROUTED, True)
        setattr(owner, name, function)


def _params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return param_groups.everyone(optimizer.param_groups)


def _wait_for_failed_backward(zero_grad: Function, params_of: Callable[[Any], Iterable[Tensor]]) -> Function:
    def function(self: Any, set_to_none: bool = True) -> Any:
        if not set_to_none:
            for owner in reducer_registry.owners_of(params_of(self)):
                owner.finish_failed_backward()
        return zero_grad(self, set_to_none)

    return function


def _refuse_sharded(unscale: Function) -> Function:
    def function(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> Any:
        if scaler.is_enabled() and any(owner.sharded for owner in reducer_registry.owners_of(_params_of(optimizer))):
            raise RuntimeError(FOREIGN_SCALER)
        return unscale(scaler, optimizer)

    return function


def _refuse_ddp(outer: torch.nn.Module, _name: str, inner: torch.nn.Module | None) -> None:
    """RuntimeError where gradients would be reduced twice."""
    if isinstance(outer, DistributedDataParallel) and inner is not None:
        for name, param in inner.named_parameters():
            if reducer_registry.owner_of(param) is not None:
                raise RuntimeError(
                    f"DistributedDataParallel around a model that was parallelized (parameter {name!r}): both would "
                    "reduce its gradients. Keep one of them: leave out parallelize and call "
                    "torch_ext.register_comm_hook(ddp, policy) on what the framework wrapped, or hand it the model "
                    "without a wrapper (Accelerate: prepare_model(model, evaluation_mode=True)) and then parallelize it"
                )


def _before_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """args, kwargs: of step, the optimizer first. Returns others in their place, or None."""
    owners = list(reducer_registry.owners_of(_params_of(optimizer)))
    if any(owner.sharded for owner in owners) and not isinstance(optimizer, Adam):
        raise RuntimeError(
            f"{type(optimizer).__name__} would step all of every parameter by gradients of which this rank has its "
            "part only: under a sharded strategy use torch_ext.AdamW (or torch_ext.Adam), or strategy 'no_shard'"
        )
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        for owner in owners:
            owner.before_step()
        return None
    if not owners or isinstance(optimizer, Adam):  # whose step calls before_step itself
        return None

    def checked() -> Any:
        """The backward is in there: what was accumulated until now need not be reduced yet."""
        loss = closure()
        for owner in owners:
            owner.before_step()
        return loss

    return args[:1], kwargs | {"closure": checked}
