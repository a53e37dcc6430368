"""Between opt.state and state_dict: the hook by which torch's own saving carries our state (`optim/state/load.py`: its
loading).

torch's state_dict hands out what is at rest. It runs hooks for everybody; ours comes closest to the optimizer.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torch_ext.comm import group_calls
from torch_ext.optim.state import codec, missing_keys, state_tensor
from torch_ext.optim.state.sources import EncodedState, PlainState, stretches
from torch_ext.optim.state.state_tensor import StateTensor
from torch_ext.optim.state.stateful import StatefulOptimizer
from torch_ext.params import local_shard, param_groups, shard_map
from torch_ext.tensors import dense


def logical(optimizer: StatefulOptimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """At rest -> logical. Parameters that never were trained have no entry, as in torch."""
    missing_keys.watch()  # who loads into it may have imported the planner since
    found: dict[Any, Any] = {}
    rest = dict(state_dict["state"])
    everyone, names = param_groups.everyone(optimizer.param_groups), param_groups.names(optimizer.param_groups)
    locals_ = optimizer.current_shards(everyone)
    with torch.no_grad():
        for index, (p, name) in enumerate(zip(everyone, names, strict=True)):
            at_rest = optimizer.state_at_rest(p)
            rest.pop(index, None)
            if "exp_avg" in at_rest:
                kinds = codec.kinds_of(optimizer.policy, p.dtype)
                found[index] = entry_of(p, locals_.of(index), at_rest, kinds, name)
    return {**state_dict, "state": {**found, **rest}}


def entry_of(
    p: Any, local: local_shard.LocalShard, at_rest: Mapping[str, Any], kinds: codec.StateDtypes, name: str
) -> dict[str, Any]:
    """The logical state of one parameter: what is logical at rest as it is, what is not as state tensors.

    State tensors are in DTensors, too: torch takes one whose local tensor does not begin its storage for a tensor with
    memory of its own, where it copies it (deepcopy, async_save), and small states of ours share theirs.
    """
    weight, cut, dtensor = local.weight.detach(), is_cut(p, local), local_shard.is_dtensor(p)
    entry = {"step": at_rest["step"]}
    lazily = cut or dense.same_order(at_rest["exp_avg"], weight)
    state = {key: value for key, value in at_rest.items() if key != "step"}
    for key, encoded in kinds.logical().items():
        if not encoded and not cut and not dtensor:
            entry[key] = state_tensor.in_boxes(at_rest[key], f"{key} of {name}")
        elif not lazily:
            entry[key] = _like(p, codec.decode(weight, at_rest, kinds, (key,))[key])
        else:
            source = (
                EncodedState(weight, state, kinds, key) if encoded else PlainState(dense.flat(at_rest[key]).view(-1))
            )
            entry[key] = _like(p, part_of(p, local, source, f"{key} of {name}"))
    return entry


def is_cut(p: Any, local: local_shard.LocalShard) -> bool:
    """Whether this rank steps a flat part of p."""
    return local.weight is not p and not local_shard.is_dtensor(p)


def part_of(p: Any, local: local_shard.LocalShard, source: state_tensor.Source, what: str) -> StateTensor:
    """source: of this rank's elements of p, or of its state."""
    if is_cut(p, local):
        return state_tensor.tensor_of(source, p, local.start, (0,) * p.ndim, what)
    origin = local_shard.origin(p) if local_shard.is_dtensor(p) else (0,) * p.ndim
    return state_tensor.tensor_of(source, local.weight, 0, origin, what)


def _like(p: Any, value: Tensor) -> Any:
    """The local part of a tensor that lies like the DTensor p as such a one; any other value as it is."""
    if not local_shard.is_dtensor(p):
        return value
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(value, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())


def masters(optimizer: StatefulOptimizer, state_dict: dict[str, Any]) -> dict[Any, Any]:
    """The master of each parameter in a logical state_dict; the weight, as state is cut, where it is its own."""
    everyone, names = param_groups.everyone(optimizer.param_groups), param_groups.names(optimizer.param_groups)
    keys = param_groups.keys(optimizer.param_groups)
    locals_ = optimizer.current_shards(everyone)
    found: dict[Any, Any] = {}
    for index, p in enumerate(everyone):
        local, entry = locals_.of(index), state_dict["state"].get(index, {})
        master = entry.get("master_param")
        if master is None and is_cut(p, local):
            master = part_of(p, local, PlainState(local.weight.detach()), names[index])
        found[keys[index]] = p.detach() if master is None else master
    return found


def consolidated(optimizer: StatefulOptimizer, state_dict: dict[str, Any], to: int | None) -> dict[str, Any] | None:
    """The parts of all ranks put together: whole tensors, as an optimizer that is not sharded has them. Collective."""
    everyone, names = param_groups.everyone(optimizer.param_groups), param_groups.names(optimizer.param_groups)
    locals_ = optimizer.current_shards(everyone)
    whole: dict[Any, Any] = {}
    receives = to is None or to == _rank()
    with torch.no_grad():
        cuts = _cuts(everyone, locals_, [i for i in state_dict["state"] if isinstance(i, int) and i < len(everyone)])
        for index, entry in state_dict["state"].items():
            p = everyone[index] if isinstance(index, int) and index < len(everyone) else None
            made = {
                key: value
                if key == "step" or p is None
                else _whole(p, locals_.of(index), value, to, f"consolidate_state_dict(): {key} of {names[index]}")
                for key, value in entry.items()
            }
            if receives:
                whole[index] = {
                    key: state_tensor.consolidated(value, cuts[index], f"{key} of {names[index]}")
                    if key != "step" and index in cuts
                    else value
                    for key, value in made.items()
                }
    return {**state_dict, "state": whole} if receives else None


def _cuts(everyone: list[Any], locals_: shard_map.ShardMap, indices: list[int]) -> dict[int, list[int]]:
    """Of each that is cut over ranks, where the parts begin and end, from 0 to numel. Collective."""
    by_groups: dict[Any, dict[int, local_shard.LocalShard]] = {}
    for index in indices:
        local = locals_.of(index)
        if is_cut(everyone[index], local):
            by_groups.setdefault(local.groups, {})[index] = local
    found: dict[int, list[int]] = {}
    for groups, members in by_groups.items():
        ends = [[local.start, local.start + local.weight.numel()] for local in members.values()]
        own = torch.tensor(ends, device=next(iter(members.values())).weight.device)
        rows = [own]
        for group in groups:
            gathered = [[torch.empty_like(row) for _ in range(group.size())] for row in rows]
            for row, into in zip(rows, gathered, strict=True):
                group_calls.all_gather(into, row, group, "consolidate_state_dict(): which rank has which part").wait()
            rows = [each for into in gathered for each in into]
        for at, index in enumerate(members):
            parts = [row[at].tolist() for row in rows]
            whole = {0, everyone[index].numel()}
            found[index] = sorted(whole.union(*(part for part in parts if part[0] < part[1])))
    return found


def _rank() -> int:
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


def _whole(p: Any, local: local_shard.LocalShard, value: Any, to: int | None, what: str) -> Tensor:
    return whole(p, local, value, to, is_cut(p, local), what)


def whole(like: Tensor, local: local_shard.LocalShard, value: Any, to: int | None, cut: bool, what: str) -> Tensor:
    """All of a state of which this rank's part is `value`, where the parameter is cut or a DTensor; else itself. like:
    of the parameter's shape and memory order; to: see `consolidated`; what: the call, for messages. Collective."""
    if local_shard.is_dtensor(value):
        with group_calls.translated_over(value.device_mesh, what):
            return value.full_tensor()
    if not cut:
        return value
    whole = dense.like(like, value.dtype)
    flat, source = dense.flat(whole).view(-1), value._held.source
    for begin, end in stretches(source.numel):
        flat[local.start + begin : local.start + end] = source.read(begin, end)
    # Every element is one rank's, and zero bits on the others: bytes can be added.
    for group in local.groups:
        if to is None:
            group_calls.all_reduce(flat.view(torch.uint8), group, what)
        else:
            group_calls.reduce(flat.view(torch.uint8), to, group, what)
    return whole
