"""Patches torch's functions that clip gradients: they find sharded gradients, and optimizers learn of the clip."""

import functools
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from torch_ext.grads import clipped
from torch_ext.optim.clip_grad import clip_grad_norm_
from torch_ext.params import reducer_registry, shard_map

Function: TypeAlias = Callable[..., Any]

ROUTED = "_torch_ext_routed"


def _clip_value(params: list[Tensor], clip_value: float, foreach: bool | None = None) -> None:
    """Clamps gradients in place, each element on the rank that steps it."""
    found = shard_map.ShardMap(params)
    for owner in reducer_registry.owners_of(params):
        owner.before_step("clip_grad_value_()")
    bound = float(clip_value)
    with torch.no_grad():
        for grad in found.grads():
            if grad is not None:
                grad.clamp_(-bound, bound)


def _clip_with_norm(params: list[Tensor], *_args: Any, **_options: Any) -> None:
    raise RuntimeError(
        "torch.nn.utils.clip_grads_with_norm_ on parameters whose gradients are sharded: the norm over all ranks is "
        "known to torch_ext only. Call torch_ext.clip_grad_norm_(optimizer, max_norm) instead"
    )


# Name of torch's function -> ours, which runs where gradients are sharded: they are not in `.grad`.
_OURS: dict[str, Function] = {
    "clip_grad_norm_": clip_grad_norm_,
    "clip_grad_value_": _clip_value,
    "clip_grads_with_norm_": _clip_with_norm,
}


def route() -> None:
    """Patches torch's functions in place. They then find sharded gradients, and tell optimizers that were registered by
    `clipped.register`. For other parameters torch's own code runs. May be called again."""
    for name, ours in _OURS.items():
        _route([torch.nn.utils, torch.nn.utils.clip_grad], name, ours)


def _route(modules: Sequence[types.ModuleType], name: str, ours: Function) -> None:
    """Patches one function. Code that has imported it by name would not see a replacement in its module. So it is
    replaced inside of torch's decorator around it, or, where there is no decorator, in the modules that export it."""
    theirs = getattr(modules[0], name, None)
    if theirs is None:
        return
    cell = dict(zip(theirs.__code__.co_freevars, theirs.__closure__ or (), strict=True)).get("func")
    if cell is not None:
        if not hasattr(cell.cell_contents, ROUTED):
            cell.cell_contents = _routed(cell.cell_contents, ours)
    elif not hasattr(theirs, ROUTED):
        routed = _routed(theirs, ours)
        for module in modules:
            if getattr(module, name, None) is theirs:
                setattr(module, name, routed)


def _routed(theirs: Function, ours: Function) -> Function:
    @functools.wraps(theirs)
    def function(parameters: Tensor | Iterable[Tensor], *args: Any, **options: Any) -> Any:
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        sharded = any(owner.sharded for owner in reducer_registry.owners_of(params))
        answer = (ours if sharded else theirs)(params, *args, **options)
        clipped.notify_clipped(params, args[0] if args else options.get("max_norm"))
        return answer

    setattr(function, ROUTED, True)
    return function
