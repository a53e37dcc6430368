"""The checks of `parallelize`'s arguments: each function raises for illegal ones, before anything is changed."""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from torch_ext.comm.communicator import MAX_BUCKETS
from torch_ext.comm.lost_ranks import refuse as refuse_group
from torch_ext.native import cuda_library
from torch_ext.optim.state import access
from torch_ext.parallel.bucket_plan import BucketPlan, plan_buckets, trainable
from torch_ext.parallel.in_use import in_use, instances
from torch_ext.parallel.parallel_module import attached_to
from torch_ext.parallel.strategies.table import STRATEGIES
from torch_ext.params import local_shard, param_groups, reducer_registry
from torch_ext.policy.policy import Policy
from torch_ext.tensors import dense, offload_guard

FULLY_SHARDED = "optim_grads_params"
"""The strategy that uses FSDP2, which manages the parameters itself; the other strategies are in STRATEGIES."""

_DEVICES = ("cpu", "cuda")

Named = Sequence[tuple[str, torch.nn.Parameter]]


def group_of(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Returns the group, or the default one for None. Raises RuntimeError if this rank cannot use it."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is not initialised: call torch.distributed.init_process_group() first (under torchrun, "
            "or with world_size=1 for a process of its own)"
        )
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        raise RuntimeError("this rank is not a member of the process group, so it cannot reduce gradients over it")
    refuse_group(group, "parallelize")
    return group


def check_model(model: torch.nn.Module, strategy: str, carried: Sequence[torch.optim.Optimizer]) -> None:
    """Raises if the model cannot be parallelized by this strategy. carried: optimizers whose states are converted."""
    if isinstance(model, DistributedDataParallel):
        raise TypeError("the model is in DistributedDataParallel, which reduces already: use register_comm_hook on it")
    named = trainable(model)
    offload_guard.refuse_gradients(list(model.parameters()), "parallelize")
    if not named:
        raise ValueError(f"{type(model).__name__} has no trainable parameter, so parallelize has no gradient to reduce")
    check_devices([*model.named_parameters(), *model.named_buffers()])
    for name, param in named:
        _check_parameter(name, param, model, strategy)
    if strategy in STRATEGIES and STRATEGIES[strategy].sharded:  # overlaps do not survive the copy to flat buffers
        dense.refuse_overlap([p for _, p in named], [repr(name) for name, _ in named])
    _check_optimizers(named, carried)


def _check_parameter(name: str, param: torch.nn.Parameter, model: torch.nn.Module, strategy: str) -> None:
    owner, attached = reducer_registry.owner_of(param), attached_to(model)
    if owner is not None and (attached is None or owner is not attached.reducer):
        raise RuntimeError(
            f"parameter {name!r} is part of another parallelized model, which reduces its gradient already"
        )
    if type(param) is not torch.nn.Parameter and not (strategy == FULLY_SHARDED and local_shard.is_dtensor(param)):
        sharded = (
            f"; strategy={FULLY_SHARDED!r} takes the DTensors of fully_shard" if local_shard.is_dtensor(param) else ""
        )
        raise TypeError(f"parameter {name!r} is a {type(param).__name__}; {strategy} takes plain parameters{sharded}")
    if param.grad is not None and owner is None:
        raise RuntimeError(f"parameter {name!r} has a gradient: call zero_grad() before parallelize")


def check_devices(named: Sequence[tuple[str, torch.Tensor]]) -> None:
    (first, tensor), *rest = named
    for name, other in rest:
        if other.device != tensor.device:
            raise ValueError(
                f"{first!r} is on {tensor.device} and {name!r} on {other.device}; a model is on one device"
            )
    if tensor.device.type not in _DEVICES:
        raise ValueError(f"the model is on {tensor.device}; this library has operators for {', '.join(_DEVICES)}")
    if tensor.device.type == "cuda" and (why_not := cuda_library.about().why_not):
        raise RuntimeError(f"the model is on {tensor.device}, and no GPU here runs this library's operators: {why_not}")


def check_step_in_backward(policy: Policy, strategy: str, find_unused_parameters: bool) -> None:
    """Raises ValueError if step_in_backward is combined with a setting whose outcome is known only after backward, when
    buckets have been stepped."""
    if not policy.step_in_backward:
        return
    if strategy not in ("optim", "optim_grads"):
        raise ValueError(f"step_in_backward=True with strategy {strategy!r}; legal with 'optim' and 'optim_grads'")
    wanted = {
        "find_unused_parameters": find_unused_parameters,
        "check_for_nan_in_grad": policy.check_for_nan_in_grad,
        "clip_grad": policy.clip_grad,
        "fp16 (a loss scale)": policy.fp16,
    }
    for what, value in wanted.items():
        if value:
            raise ValueError(
                f"step_in_backward=True and {what}={value}: that needs all gradients, and by the end of backward "
                "some buckets have been stepped already; leave out one of the two"
            )


def checked_plan(model: torch.nn.Module, policy: Policy, world_size: int) -> BucketPlan:
    """Returns the plan. Raises ValueError if it has more buckets than there are message numbers."""
    plan = plan_buckets(trainable(model), policy, world_size)
    if len(plan.buckets) > MAX_BUCKETS:
        raise ValueError(f"{len(plan.buckets)} buckets; at most {MAX_BUCKETS} are legal: raise bucket_size")
    return plan


# -- optimizers that have state -----------------------------------------------------------------------------------


def any_optimizer_has_state(named: Named) -> bool:
    """Whether an optimizer that is still in use has state for one of the parameters."""
    return _optimizer_with_state({id(p): name for name, p in named}, ()) is not None


def _check_optimizers(named: Named, carried: Sequence[torch.optim.Optimizer]) -> None:
    names = {id(p): name for name, p in named}
    if found := _optimizer_with_state(names, carried):
        kind, param = found
        raise RuntimeError(
            f"an optimizer ({kind}) has state for parameter {names[param]!r}: that state would not match the "
            "weights, which parallelize copies from rank 0 and moves in memory. Pass the optimizer "
            "(parallelize(..., optimizer=optimizer)), delete it, or call parallelize before the first step; load a "
            "saved state afterwards."
        )


def _optimizer_with_state(names: Mapping[int, str], carried: Sequence[torch.optim.Optimizer]) -> tuple[str, int] | None:
    """Searches for an optimizer that is in use, is not carried, and has state for one of the parameters. Returns the
    name of its class and the parameter's id, or None."""
    known = set(map(id, carried))
    # Only weak references from here on: `in_use` looks for other references to the optimizer.
    for held in [weakref.ref(o) for o in instances(torch.optim.Optimizer) if id(o) not in known]:
        param = _param_with_state(held, names)
        if param and in_use(held):
            return type(held()).__name__, param
    return None


def _param_with_state(held: "weakref.ref[Any]", names: Mapping[int, str]) -> int:
    """Returns the id of a parameter, one of `names`, for which the optimizer has state; 0 if there is none."""
    optimizer = held()
    state = getattr(optimizer, "state", None)
    if not isinstance(state, dict):
        return 0
    for param in param_groups.all_params(getattr(optimizer, "param_groups", [])):
        # A step count of zero alone does not count as state.
        of_param = dict(access.peek(state, param))
        if id(param) in names and (of_param.pop("step", 0) or of_param):
            return id(param)
    return 0
