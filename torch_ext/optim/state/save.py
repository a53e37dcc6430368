"""Stored state -> logical state_dict: the post hook by which torch's own state_dict() returns our state. (The inverse:
`load`.)"""

from typing import Any

import torch
from torch import Tensor

from torch_ext.comm import group_calls
from torch_ext.optim.state import codec, large_tensor, missing_keys
from torch_ext.optim.state.sources import PlainState, Source, ranges, source_of
from torch_ext.optim.state.state_dtypes import EMA, first_moment
from torch_ext.optim.state.state_tensor import StateTensor
from torch_ext.optim.state.stateful import StatefulOptimizer, StatefulParam, params_of
from torch_ext.params import keep_32bit, local_shard, param_groups
from torch_ext.tensors import dense


def logical(optimizer: StatefulOptimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Returns the state_dict with logical states in place of stored ones. Parameters that were never trained have no
    entry, as in torch."""
    missing_keys.patch_planner()  # again: torch's planner may have been imported since, to load into this state_dict
    params = params_of(optimizer)
    with torch.no_grad():
        found: dict[Any, Any] = {p.index: entry_of(p) for p in params if first_moment(p.stored) is not None}
    indices = {p.index for p in params}
    rest = {key: value for key, value in state_dict["state"].items() if key not in indices}
    own_groups = keep_32bit.without_own_keys(state_dict["param_groups"])
    return {**state_dict, "state": found | rest, "param_groups": own_groups}


def entry_of(p: StatefulParam) -> dict[str, Any]:
    """Returns the logical state of one parameter: of tensors that are stored in logical form other tensors on the same
    memory, so that nobody can replace those (see access.py); of others state tensors.

    In DTensors even tensors in logical form are state tensors: where torch copies a DTensor (deepcopy, async_save), it
    assumes that the local tensor shares its storage with no other, but small states of ours share one.
    """
    weight = p.local.weight.detach()
    same_order = p.flat_shard or dense.same_order(p.stored[p.kinds.first], weight)
    entry = {"step": dense.alias(p.stored["step"])}
    for key, encoded in p.kinds.logical().items():
        what = f"{key} of {p.name}"
        if not encoded and not p.flat_shard and not local_shard.is_dtensor(p.param):
            entry[key] = large_tensor.large(dense.alias(p.stored[key]), what)
        elif same_order:
            source = source_of(weight, p.stored, p.kinds, key)
            entry[key] = _placed_like(p.param, _state_tensor(p, source, what))
        else:
            entry[key] = _placed_like(p.param, codec.decode(weight, p.stored, p.kinds, key))
    return entry


def _state_tensor(p: StatefulParam, source: Source, what: str) -> StateTensor:
    """Returns a tensor of the parameter's shape on `source`: this rank's elements of the parameter, or of its state."""
    param = p.param
    if p.flat_shard:
        return StateTensor.of(source, param, p.local.offset, (0,) * param.ndim, what)
    origin = local_shard.origin(param) if local_shard.is_dtensor(param) else (0,) * param.ndim
    return StateTensor.of(source, p.local.weight, 0, origin, what)


def _placed_like(p: Any, value: Tensor) -> Any:
    """Returns a DTensor with this local tensor and the placements of p; the value itself where p is no DTensor."""
    if not local_shard.is_dtensor(p):
        return value
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(value, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())


def masters(optimizer: StatefulOptimizer, state_dict: dict[str, Any]) -> dict[Any, Any]:
    """Returns each parameter's master from a logical state_dict; where it has none its weight, sharded as state is."""
    found: dict[Any, Any] = {}
    for p, key in zip(params_of(optimizer), param_groups.keys(optimizer.param_groups), strict=True):
        master = state_dict["state"].get(p.index, {}).get("master_param")
        found[key] = _weight_of(p) if master is None else master
    return found


def _weight_of(p: StatefulParam) -> Any:
    """Returns the weight; of a parameter that is sharded over the ranks this rank's part, as a state tensor."""
    return _state_tensor(p, PlainState(p.local.weight.detach()), p.name) if p.flat_shard else p.param.detach()


def averages(optimizer: StatefulOptimizer, state_dict: dict[str, Any]) -> dict[Any, Any]:
    """Returns each parameter's average from a logical state_dict, in fp32; where none has begun its weight."""
    found: dict[Any, Any] = {}
    for p, key in zip(params_of(optimizer), param_groups.keys(optimizer.param_groups), strict=True):
        entry = state_dict["state"].get(p.index, {})
        average = entry[EMA] if EMA in entry and optimizer.averaging.has_begun(entry) else _weight_of(p)
        found[key] = average if average.dtype == torch.float32 else average.to(torch.float32)
    return found


def consolidated(optimizer: StatefulOptimizer, state_dict: dict[str, Any], to: int | None) -> dict[str, Any] | None:
    """Returns a state_dict of whole tensors, assembled from the parts of all ranks. Collective.

    to: the global rank that gets it (None is returned on others); None: every rank gets it.
    """
    params: dict[Any, StatefulParam] = {p.index: p for p in params_of(optimizer)}
    found: dict[Any, Any] = {}
    receives = to is None or to == _rank()
    with torch.no_grad():
        cuts = _cuts([params[index] for index in state_dict["state"] if index in params])
        for index, entry in state_dict["state"].items():
            found[index] = {}
            for key, value in entry.items():
                if key != "step" and (p := params.get(index)) is not None:
                    what = f"{key} of {p.name}"
                    value = gather_whole(p.param, p.local, value, to, p.flat_shard, f"consolidate_state_dict(): {what}")
                    if receives and index in cuts:
                        value = large_tensor.consolidated(value, cuts[index], what)
                if receives:
                    found[index][key] = value
    return {**state_dict, "state": found} if receives else None


def _cuts(params: list[StatefulParam]) -> dict[int, list[int]]:
    """Returns the bounds of the ranks' parts, from 0 to numel, of each sharded parameter. Collective."""
    by_groups: dict[Any, list[StatefulParam]] = {}
    for p in params:
        if p.flat_shard:
            by_groups.setdefault(p.local.groups, []).append(p)
    found: dict[int, list[int]] = {}
    for groups, members in by_groups.items():
        ends = [[p.local.offset, p.local.offset + p.local.weight.numel()] for p in members]
        rows = [torch.tensor(ends, device=members[0].local.weight.device)]
        for group in groups:
            gathered = [[torch.empty_like(row) for _ in range(group.size())] for row in rows]
            for row, into in zip(rows, gathered, strict=True):
                group_calls.all_gather(into, row, group, "consolidate_state_dict(): which rank has which part").wait()
            rows = [each for into in gathered for each in into]
        for at, p in enumerate(members):
            parts = [row[at].tolist() for row in rows]
            found[p.index] = sorted({0, p.param.numel()}.union(*(part for part in parts if part[0] < part[1])))
    return found


def _rank() -> int:
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


def gather_whole(
    like: Tensor, local: local_shard.LocalShard, value: Any, to: int | None, flat_shard: bool, what: str
) -> Tensor:
    """Returns the whole tensor of which `value` is this rank's part, where the parameter is sharded or a DTensor; else
    `value`. like: has the parameter's shape and memory order. to: see `consolidated`. what: the call, for messages.
    Collective."""
    if local_shard.is_dtensor(value):
        with group_calls.translated_over(value.device_mesh, what):
            return value.full_tensor()
    if not flat_shard:
        return value
    full = dense.zeros_in_order_of(like, value.dtype)
    flat = dense.flat(full).view(-1)
    for begin, values in ranges(value.handle.source):
        flat[local.offset + begin : local.offset + begin + values.numel()] = values
    # Each element is on one rank, and has zero bits on all others: adding bytes gives its bits, whatever the dtype.
    for group in local.groups:
        if to is None:
            group_calls.all_reduce(flat.view(torch.uint8), group, what)
        else:
            group_calls.reduce(flat.view(torch.uint8), to, group, what)
    return full
