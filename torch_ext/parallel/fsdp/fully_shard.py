"""Strategy optim_grads_params: shards a model by torch's FSDP2 and installs this library's collectives in it."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from torch_ext.comm import compression
from torch_ext.comm.communicator import Communicator
from torch_ext.comm.init_sync import broadcast
from torch_ext.parallel.fsdp import fsdp_units
from torch_ext.parallel.fsdp.fsdp_comm import AllGather, ReduceScatter
from torch_ext.parallel.fsdp.fsdp_reducer import FSDPReducer
from torch_ext.parallel.fsdp.fsdp_units import fsdp_modules
from torch_ext.parallel.fsdp.param_gather import ParamGather
from torch_ext.parallel.fsdp.reduce_scatter import UnitPlan, unit_called
from torch_ext.parallel.in_use import instances
from torch_ext.params import reducer_registry
from torch_ext.params.local_shard import tensor_of
from torch_ext.policy import policy_source
from torch_ext.policy.policy import Policy


def describe(model: nn.Module, policy: Policy, group: dist.ProcessGroup) -> list[str]:
    """Returns, as text, what must be equal on all ranks. Changes nothing, but frees unsharded weights that a forward
    left in memory.

    Raises ValueError or TypeError, naming the parameter or module, for a model that FSDP2 or this library cannot shard.
    """
    for name, param in model.named_parameters():
        if param.requires_grad and param.numel() == 0:
            raise ValueError(
                f"parameter {name!r} has no elements, which FSDP2 cannot reduce: freeze it, or leave it out"
            )
    if not fsdp_modules(model):
        units = fsdp_units.units_of(model, policy.bucket_size)
        names = {module: name for name, module in model.named_modules()}
        return [f"{unit_called(*(names[m] for m in unit.modules))} of {unit.dtype}" for unit in units]
    for owner in reducer_registry.owners_of(model.parameters()):
        owner.sync_parameters()
    for _, module in fsdp_modules(model):
        module.reshard()
    _check_sharded(model, group)
    return [
        f"{unit}: {unit.main_grads_dtype} from {unit.grad_comm_dtype}, {unit.replicas} replicas"
        for _, unit in _plan_units(model, policy, _units_of_user(model))
    ]


def shard_fully(
    model: nn.Module,
    policy: Policy,
    control: Communicator,
    number: int,
    *,
    divide_factor: float | None,
    find_unused_parameters: bool,
) -> FSDPReducer:
    """Shards the model, unless its user has done so, and installs this library's collectives in each of its units.

    Call it after all ranks had the same `describe`. Rank 0's weights and buffers are copied to all ranks; for a model
    that is sharded already, the first replica's shards are copied to the other replicas. Sharding replaces the
    parameters; optimizers without state get the new ones. control: a communicator over the group. number: from
    `agree`. divide_factor: see FSDPReducer.
    """
    group = control.group
    control.compresses = control.can_compress and compression.is_on(policy, policy.link_gbps)  # not measured here
    own = not fsdp_modules(model)
    _same_weights(model, group)
    if own:
        before = {id(p): name for name, p in model.named_parameters()}
        made = fsdp_units.units_of(model, policy.bucket_size)
        fsdp_units.shard(made, policy, group, control.device)
        _replace_in_optimizers(before, dict(model.named_parameters()))
        modules = [[cast(FSDPModule, m) for m in unit.modules] for unit in [made[-1], *made[:-1]]]
    else:
        modules = _units_of_user(model)
    units = _plan_units(model, policy, modules)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    unit_of = _unit_of(modules)
    reducer = FSDPReducer(
        named,
        [unit for _, unit in units],
        [unit_of[id(p)] for _, p in named],
        control,
        number,
        divide_factor=divide_factor,
        check_for_nan=policy.check_for_nan_in_grad,
        find_unused_parameters=find_unused_parameters,
    )
    weights = reducer.attach(model, [[cast(nn.Module, m) for m in of_unit] for of_unit in modules], prefetch=own)
    for of_unit, unit in units:
        _install(of_unit[0], unit, reducer, weights, find_unused_parameters)
    return reducer


def _install(
    module: FSDPModule, unit: UnitPlan, reducer: FSDPReducer, weights: ParamGather, find_unused_parameters: bool
) -> None:
    module.set_force_sum_reduction_for_comms(False)
    module.set_custom_reduce_scatter(cast(Any, ReduceScatter(reducer, unit)))
    module.set_custom_all_gather(cast(Any, AllGather(weights, unit)))
    module.set_all_reduce_hook(lambda output: reducer.reduced(unit, output))
    if find_unused_parameters and hasattr(module, "set_reduce_scatter_unused_params"):  # torch >= 2.13
        module.set_reduce_scatter_unused_params(True, recurse=False)


def _units_of_user(model: nn.Module) -> list[list[FSDPModule]]:
    """Returns each FSDP2 module as a unit. If the user gave several modules to one fully_shard, FSDP2 uses the
    collectives of one of them and does not tell which: so each gets its own."""
    return [[module] for _, module in fsdp_modules(model)]


def _unit_of(units: Sequence[Sequence[FSDPModule]]) -> dict[int, int]:
    """Returns each parameter's unit, by the parameter's id: the innermost one whose modules contain it."""
    modules = [(i, cast(nn.Module, module)) for i, unit in enumerate(units) for module in unit]
    modules.sort(key=lambda one: -sum(1 for _ in one[1].modules()))
    return {id(p): i for i, module in modules for p in module.parameters()}


def _plan_units(
    model: nn.Module, policy: Policy, units: Sequence[Sequence[FSDPModule]]
) -> list[tuple[Sequence[FSDPModule], UnitPlan]]:
    names: dict[Any, str] = {module: name for name, module in model.named_modules()}
    of_unit: dict[int, list[Any]] = {}
    unit_of = _unit_of(units)
    for p in model.parameters():
        of_unit.setdefault(unit_of.get(id(p), -1), []).append(p)
    precisions = policy_source.precisions(model)
    plans = []
    for i, modules in enumerate(units):
        params = of_unit.get(i, [])
        trained = [p for p in params if p.requires_grad]
        dtype = trained[0].dtype if trained else policy.param_dtype
        # From torch 2.15 on, a user's param_dtype_override_fn may keep some of a unit's parameters in a wider dtype;
        # the unit's messages, which all its parameters share, then have the widest.
        computed = [precisions[id(p)].computed for p in trained if id(p) in precisions]
        row = policy.row(dtype, computed=max(computed, key=lambda each: each.itemsize, default=None))
        main = row.main_grads_dtype or dtype
        replicas = max((_replicas(p) for p in params), default=1)
        name = " ... ".join(dict.fromkeys(names[m] for m in (modules[0], modules[-1])))
        plans.append((modules, UnitPlan(i, name, main, row.grad_comm_dtype or main, replicas)))
    return plans


def _replicas(param: Any) -> int:
    """Returns how many replicas of each shard HSDP keeps, or 1. HSDP's mesh replicates over its first dimension and
    shards over a later one. (Other replicated dimensions belong to tensor parallelism.)"""
    if not isinstance(param, DTensor) or len(param.placements) < 2 or not param.placements[0].is_replicate():
        return 1
    return int(param.device_mesh.size(0))


def _check_sharded(model: nn.Module, group: dist.ProcessGroup) -> None:
    ranks = set(dist.get_process_group_ranks(group))
    for name, param in model.named_parameters():
        if not isinstance(param, DTensor):
            if param.requires_grad:
                raise ValueError(
                    f"parameter {name!r} is not sharded, so its gradient would not be reduced: call fully_shard on "
                    "the model itself too, without ignored_params, or leave all of fully_shard to parallelize"
                )
            continue
        if getattr(param, "_post_accumulate_grad_hooks", None) and reducer_registry.owner_of(param) is None:
            raise ValueError(
                f"parameter {name!r} has hooks of register_post_accumulate_grad_hook, which FSDP2 would call before "
                "the gradient is reduced: remove them, or use the gradients after backward"
            )
        members = set(param.device_mesh.mesh.flatten().tolist())
        if not members <= ranks:
            raise ValueError(
                f"parameter {name!r} is sharded over ranks {sorted(members)}, and the process group has "
                f"{sorted(ranks)}: pass parallelize a process_group with all of them"
            )


def _same_weights(model: nn.Module, group: dist.ProcessGroup) -> None:
    tensors = [*model.parameters(), *model.buffers()]
    what = "parallelize: rank 0's weights and buffers"
    broadcast([t for t in tensors if not isinstance(t, DTensor)], group, what)
    replicated: dict[dist.ProcessGroup, list[Tensor]] = {}
    for param in tensors:
        if isinstance(param, DTensor):
            for dim, placement in enumerate(param.placements):
                if placement.is_replicate():
                    replicated.setdefault(param.device_mesh.get_group(dim), []).append(tensor_of(param))
    for replicas, shards in replicated.items():
        broadcast(shards, replicas, what)


def _replace_in_optimizers(before: Mapping[int, str], now: Mapping[str, nn.Parameter]) -> None:
    """Replaces parameters in existing optimizers: FSDP2 has given the model new ones."""
    for optimizer in instances(torch.optim.Optimizer):
        for group in getattr(optimizer, "param_groups", ()):
            params: Iterable[Any] = group["params"]
            group["params"] = [now[before[id(p)]] if id(p) in before else p for p in params]
