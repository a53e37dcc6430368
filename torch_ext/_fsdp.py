"""Strategy optim_grads_params: torch's FSDP2, with this library's exchange in it."""

import gc
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from torch_ext import _fsdp_units
from torch_ext._broadcast import broadcast
from torch_ext._exchange import Exchange
from torch_ext._fsdp_comm import AllGather, ReduceScatter
from torch_ext._fsdp_engine import FsdpEngine
from torch_ext._fsdp_reduction import UnitPlan
from torch_ext._fsdp_units import fsdp_modules
from torch_ext._local import tensor_of
from torch_ext._policy import Policy


def describe(model: nn.Module, policy: Policy, group: dist.ProcessGroup) -> list[str]:
    """What must be equal on all ranks, as text. Changes nothing.

    Raises ValueError or TypeError, naming the parameter or the module, for what FSDP2 or this library cannot shard.
    """
    if not fsdp_modules(model):
        units = _fsdp_units.units_of(model)
        names = {id(module): name for name, module in model.named_modules()}
        return [f"unit {names[id(unit.module)]!r} of {unit.dtype}" for unit in units]
    _check_sharded(model, group)
    return [
        f"unit {unit.name!r}: {unit.main_grads_dtype} from {unit.grad_comm_dtype}, {unit.replicas} replicas"
        for _, unit in _plan_units(model, policy)
    ]


def shard_fully(
    model: nn.Module,
    policy: Policy,
    control: Exchange,
    number: int,
    *,
    divide_factor: float | None,
    find_unused_parameters: bool,
) -> FsdpEngine:
    """Shards the model, unless its user has done so, and puts this library's exchange into each of its units.

    After `describe` was found to be equal everywhere. Rank 0's weights and buffers are everybody's; of a model that is
    sharded already, each shard is its first replica's. Parameters are other objects afterwards; optimizers without
    state get them. control: over the group; number: of `agree`; divide_factor: see FsdpEngine.
    """
    group = control.group
    own = not fsdp_modules(model)
    _same_weights(model, group)
    if own:
        before = {id(p): name for name, p in model.named_parameters()}
        _fsdp_units.shard(_fsdp_units.units_of(model), policy, group, control.device)
        _replace_in_optimizers(before, dict(model.named_parameters()))
    units = _plan_units(model, policy)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    unit_of = {id(p): unit.number for module, unit in units for p in cast(nn.Module, module).parameters()}
    engine = FsdpEngine(
        named,
        [unit for _, unit in units],
        [unit_of[id(p)] for _, p in named],
        control,
        number,
        divide_factor=divide_factor,
        check_for_nan=policy.check_for_nan_in_grad,
        find_unused_parameters=find_unused_parameters,
    )
    for module, unit in units:
        _install(module, unit, engine, find_unused_parameters)
    engine.attach(model, [module for module, _ in units], prefetch=own)
    return engine


def _install(module: FSDPModule, unit: UnitPlan, engine: FsdpEngine, find_unused_parameters: bool) -> None:
    module.set_force_sum_reduction_for_comms(False)
    module.set_custom_reduce_scatter(cast(Any, ReduceScatter(engine, unit)))
    module.set_custom_all_gather(cast(Any, AllGather(engine, unit)))
    module.set_all_reduce_hook(lambda output: engine.reduced(unit, output))
    if find_unused_parameters and hasattr(module, "set_reduce_scatter_unused_params"):  # torch >= 2.13
        module.set_reduce_scatter_unused_params(True, recurse=False)


def _plan_units(model: nn.Module, policy: Policy) -> list[tuple[FSDPModule, UnitPlan]]:
    """The units, outer ones before those inside them."""
    found = fsdp_modules(model)
    of_unit: dict[int, list[Any]] = {}
    unit_of = {id(p): i for i, (_, module) in enumerate(found) for p in cast(nn.Module, module).parameters()}
    for p in model.parameters():
        of_unit.setdefault(unit_of.get(id(p), -1), []).append(p)
    plans = []
    for i, (name, module) in enumerate(found):
        params = of_unit.get(i, [])
        dtype = next((p.dtype for p in params if p.requires_grad), policy.param_dtype)
        row = policy.row(dtype)
        main = row.main_grads_dtype or dtype
        replicas = max((_replicas(p) for p in params), default=1)
        plans.append((module, UnitPlan(i, name, main, row.grad_comm_dtype or main, replicas)))
    return plans


def _replicas(param: Any) -> int:
    """HSDP: the mesh's first dimension replicates and a later one shards. (Of others, tensor parallelism knows.)"""
    if not isinstance(param, DTensor) or len(param.placements) < 2 or not param.placements[0].is_replicate():
        return 1
    return int(param.device_mesh.size(0))


def _check_sharded(model: nn.Module, group: dist.ProcessGroup) -> None:
    ranks = set(dist.get_process_group_ranks(group))
    for name, param in model.named_parameters():
        if not isinstance(param, DTensor):
            if param.requires_grad:
                raise ValueError(
                    f"parameter {name!r} is not sharded, so nobody would reduce its gradient: call fully_shard on the "
                    "model itself too, without ignored_params, or leave all of fully_shard to parallelize"
                )
            continue
        members = set(param.device_mesh.mesh.flatten().tolist())
        if not members <= ranks:
            raise ValueError(
                f"parameter {name!r} is sharded over ranks {sorted(members)}, and the process group has "
                f"{sorted(ranks)}: pass parallelize a process_group with all of them"
            )


def _same_weights(model: nn.Module, group: dist.ProcessGroup) -> None:
    tensors = [*model.parameters(), *model.buffers()]
    broadcast([t for t in tensors if not isinstance(t, DTensor)], group)
    replicated: dict[dist.ProcessGroup, list[Tensor]] = {}
    for param in tensors:
        if isinstance(param, DTensor):
            for dim, placement in enumerate(param.placements):
                if placement.is_replicate():
                    replicated.setdefault(param.device_mesh.get_group(dim), []).append(tensor_of(param))
    for replicas, shards in replicated.items():
        broadcast(shards, replicas)


def _replace_in_optimizers(before: Mapping[int, str], now: Mapping[str, nn.Parameter]) -> None:
    """Optimizers that were made before hold parameters that are no longer the model's."""
    for optimizer in [o for o in gc.get_objects() if issubclass(type(o), torch.optim.Optimizer)]:
        for group in getattr(optimizer, "param_groups", ()):
            params: Iterable[Any] = group["params"]
            group["params"] = [now[before[id(p)]] if id(p) in before else p for p in params]
