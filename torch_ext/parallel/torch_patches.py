"""Hooks and patches that make other packages' code work correctly with parallelized models, or raise an error.

Note: what torch has a public hook for, and what it has not

torch has public hooks for an optimizer's step (`register_optimizer_step_pre_hook`) and for putting a model into
DistributedDataParallel (`register_module_module_registration_hook`). Three things have no hook. They are patched for
the whole process, from the first call of `parallelize` that needs it; nothing changes for parameters without a reducer
of ours:

- torch.nn.utils.clip_grad_norm_ and clip_grad_value_, under sharded strategies (optim/torch_clip_functions.py): `.grad`
  is None there, or this rank's own gradient. Its norm would be zero, or differ between ranks, and clipping would
  silently do nothing or the wrong thing. Frameworks call these functions and cannot be given others.
- torch.amp.GradScaler.unscale_, under sharded strategies: it would unscale `.grad`, and step or skip by what this rank
  alone found there. (If torch_ext's optimizers unscale in their step, step() itself rejects this scaler.)
- zero_grad(set_to_none=False) of optimizers and modules: after a backward that raised, sums under way would overwrite
  the zeros. So it waits for them first.
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
    """Installs hooks and patches; sharded: those of sharded strategies, too. A repeated call changes nothing."""
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
    return param_groups.all_params(optimizer.param_groups)


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
    """Raises RuntimeError if DistributedDataParallel gets a parallelized model: gradients would be reduced twice."""
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
    """Step pre-hook. args, kwargs: those of step, the optimizer first. Returns replacements for them, or None."""
    owners = list(reducer_registry.owners_of(_params_of(optimizer)))
    if any(owner.sharded for owner in owners) and not isinstance(optimizer, Adam):
        raise RuntimeError(
            f"{type(optimizer).__name__} would step whole parameters, but this rank has only its shard of each "
            "gradient: under a sharded strategy use torch_ext.AdamW (or torch_ext.Adam), or strategy 'no_shard'"
        )
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        for owner in owners:
            owner.before_step("step()")
    for owner in owners:
        owner.step_called()
    if closure is None or not owners or isinstance(optimizer, Adam):  # our optimizers' step calls before_step itself
        return None

    def checked() -> Any:
        """Runs the user's closure, then `before_step`: the backward is in the closure, so that gradients need not be
        reduced before it."""
        loss = closure()
        for owner in owners:
            owner.before_step("step()")
        return loss

    return args[:1], kwargs | {"closure": checked}
