"""What other people's code does to models that were parallelized: clipping by torch's functions, torch's loss scale,
and wrapping in DDP.

Where a strategy shards gradients `.grad` is None, or this rank's own. A norm taken of it would be another one on each
rank, or zero, and nothing would be clipped without a word. Frameworks call torch's functions and have no place to ask
for others, so these functions see to such parameters from the first sharded `parallelize` on; all others they treat as
before. torch's GradScaler refuses such parameters from then on.
"""

import functools
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from torch_ext import _away, _local, _registry
from torch_ext._clip import clip_grad_norm_
from torch_ext._refusals import FOREIGN_SCALER

Function: TypeAlias = Callable[..., Any]

_ROUTED = "_torch_ext_routed"


def _clip_value(params: list[Tensor], clip_value: float, foreach: bool | None = None) -> None:
    """Elements are clamped where they are: each on the rank that steps it."""
    _away.refuse_gradients(params, "torch.nn.utils.clip_grad_value_()")
    found = _local.Locals(params, list(map(_registry.owner_of, params)), _registry.generation)
    for owner in _registry.owners_of(params):
        owner.before_step()
    bound = float(clip_value)
    with torch.no_grad():
        for grad in found.grads():
            if grad is not None:
                grad.clamp_(-bound, bound)


def _clip_with_norm(params: list[Tensor], *_args: Any, **_options: Any) -> None:
    raise RuntimeError(
        "torch.nn.utils.clip_grads_with_norm_ on parameters whose gradients are sharded: no other function could have "
        "found their norm. Call torch_ext.clip_grad_norm_(optimizer, max_norm)"
    )


# torch's function of that name -> ours, where a gradient is elsewhere than in `.grad`.
_OURS: dict[str, Function] = {
    "clip_grad_norm_": clip_grad_norm_,
    "clip_grad_value_": _clip_value,
    "clip_grads_with_norm_": _clip_with_norm,
}


def find_shards() -> None:
    """From here on torch.nn.utils.clip_grad_norm_ and clip_grad_value_ find sharded gradients, and torch's own loss
    scale refuses them. Again and again is as good as once."""
    for name, ours in _OURS.items():
        _route([torch.nn.utils, torch.nn.utils.clip_grad], name, ours)
    for name in ("unscale_", "step"):
        method = getattr(torch.amp.GradScaler, name)
        if not hasattr(method, _ROUTED):
            setattr(torch.amp.GradScaler, name, _refusing(method))


def settle_before_zeroing() -> None:
    """From here on zero_grad(set_to_none=False) of optimizers and modules waits for sums that a backward which raised
    left on their way: they would be written to what is zero then. Again and again is as good as once."""
    for owner, params_of in ((torch.optim.Optimizer, _of_optimizer), (torch.nn.Module, torch.nn.Module.parameters)):
        if not hasattr(owner.zero_grad, _ROUTED):
            owner.zero_grad = _settling(owner.zero_grad, params_of)  # type: ignore[method-assign]


def _of_optimizer(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _settling(method: Function, params_of: Callable[[Any], Iterable[Tensor]]) -> Function:
    @functools.wraps(method)
    def zero_grad(self: Any, set_to_none: bool = True) -> Any:
        if not set_to_none:
            for owner in _registry.owners_of(params_of(self)):
                owner.settle()
        return method(self, set_to_none)

    setattr(zero_grad, _ROUTED, True)
    return zero_grad


def _refusing(method: Function) -> Function:
    """A method of torch.amp.GradScaler; ours has its own."""

    @functools.wraps(method)
    def function(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **options: Any) -> Any:
        params = _of_optimizer(optimizer)
        if scaler.is_enabled() and any(owner.sharded for owner in _registry.owners_of(params)):
            raise RuntimeError(FOREIGN_SCALER)
        return method(scaler, optimizer, *args, **options)

    setattr(function, _ROUTED, True)
    return function


def _route(modules: Sequence[types.ModuleType], name: str, ours: Function) -> None:
    """Whoever imported the function by its name has it already, so it is replaced inside of the decorator that torch
    has around it; where there is none, in the modules that users import it from."""
    theirs = getattr(modules[0], name, None)
    if theirs is None:
        return
    cell = dict(zip(theirs.__code__.co_freevars, theirs.__closure__ or (), strict=True)).get("func")
    if cell is not None:
        if not hasattr(cell.cell_contents, _ROUTED):
            cell.cell_contents = _routed(cell.cell_contents, ours)
    elif not hasattr(theirs, _ROUTED):
        routed = _routed(theirs, ours)
        for module in modules:
            if getattr(module, name, None) is theirs:
                setattr(module, name, routed)


def _routed(theirs: Function, ours: Function) -> Function:
    @functools.wraps(theirs)
    def function(parameters: Tensor | Iterable[Tensor], *args: Any, **options: Any) -> Any:
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        sharded = any(owner.sharded for owner in _registry.owners_of(params))
        return (ours if sharded else theirs)(params, *args, **options)

    setattr(function, _ROUTED, True)
    return function


def refuse_ddp(outer: torch.nn.Module, _name: str, inner: torch.nn.Module | None) -> None:
    """A hook of `register_module_module_registration_hook`: RuntimeError where gradients would be reduced twice."""
    if isinstance(outer, DistributedDataParallel) and inner is not None:
        for name, param in inner.named_parameters():
            if _registry.owner_of(param) is not None:
                raise RuntimeError(
                    f"DistributedDataParallel around a model that was parallelized (parameter {name!r}): both would "
                    "reduce its gradients. Keep one of them: leave out parallelize and call "
                    "torch_ext.register_comm_hook(ddp, policy) on what the framework wrapped, or hand it the model "
                    "without a wrapper (Accelerate: prepare_model(model, evaluation_mode=True)) and then parallelize it"
                )
