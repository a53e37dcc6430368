"""Logical state_dict -> stored state: the pre hook by which torch's own load_state_dict() loads our state. (The
inverse: `save`.)

Note: EncodedEntry. torch's load_state_dict casts tensors to the parameter's dtype, which would round masters; objects
of types that it does not know it passes on unchanged. So the hook, which runs after all others, checks everything,
encodes it, and gives torch an EncodedEntry for each parameter. The optimizer's __setstate__ takes the stored state out
of these.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_ext.comm import group_calls
from torch_ext.native import warning
from torch_ext.optim.state import codec, load_checks
from torch_ext.optim.state.sources import ranges, same_values, source_of
from torch_ext.optim.state.state_dtypes import EMA, StateDtypes
from torch_ext.optim.state.state_tensor import StateTensor
from torch_ext.optim.state.stateful import StatefulOptimizer, StatefulParam, first_names, params_of
from torch_ext.params import keep_32bit, local_shard
from torch_ext.tensors import dense


class EncodedEntry:
    """Wraps the stored state of one parameter on its way through torch's load_state_dict. host: whether the state
    belongs on the host."""

    def __init__(self, state: dict[str, Any], host: bool) -> None:
        self.state, self.host = state, host


class _Target(NamedTuple):
    """The parameter that an entry of the loaded state belongs to."""

    p: StatefulParam
    host: bool  # whether it is stepped on the host
    weight: Tensor  # this rank's part, detached, on the device where the state will be stored


class _Losses:
    """Names of parameters whose loaded and stored states differ, by kind of difference, for one warning."""

    def __init__(self) -> None:
        self.rounded: dict[str, list[str]] = defaultdict(list)
        """By key: some element was rounded."""
        self.dropped: list[str] = []
        """The parameter has no master, and the saved one has values that the weight cannot hold."""
        self.seeded: list[str] = []
        """The parameter has a master, and none was saved."""
        self.missing_emas: list[str] = []
        """The optimizer keeps an average of the parameter, and none was saved."""
        self.dropped_emas: list[str] = []
        """The optimizer keeps no average, and one was saved."""

    def warn(self) -> None:
        """Emits one warning, if there are differences."""
        said = [
            f"{key} of {first_names(names)} was saved in more bits than the policy keeps, and is rounded to those"
            for key, names in self.rounded.items()
        ]
        if self.dropped:
            said.append(f"master_param of {first_names(self.dropped)} is dropped: the policy keeps the weight only")
        if self.seeded:
            said.append(f"there is no master_param of {first_names(self.seeded)}: the weight is its master from now on")
        if self.missing_emas:
            said.append(
                f"there is no ema_param of {first_names(self.missing_emas)}: the average begins with the master"
            )
        if self.dropped_emas:
            said.append(f"ema_param of {first_names(self.dropped_emas)} is dropped: there is no ema_decay")
        if said:
            warning.warn(f"of the loaded state {'; '.join(said)}")


def encode_for_load(optimizer: StatefulOptimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Checks a logical state_dict, and returns it with stored states. Changes nothing of the optimizer, except that
    pending writes to its own state tensors are completed."""
    # Reading optimizer.state[p] of a torch.optim.Optimizer leaves {} there: such an entry is no state.
    nonempty = {key: entry for key, entry in state_dict.get("state", {}).items() if entry != {}}
    state_dict = state_dict | ({"state": nonempty} if "state" in state_dict else {})
    targets = _targets(optimizer, state_dict)
    entries = {key: load_checks.checked_entry(targets[key].p, given) for key, given in state_dict["state"].items()}
    losses = _Losses()
    with dense.normal_tensors():
        states = {key: _present_state(targets[key], entry) for key, entry in entries.items()}
        missing = [key for key, state in states.items() if state is None]
        made = codec.make([(targets[key].weight, targets[key].p.kinds) for key in missing])
        new = dict(zip(missing, made, strict=True))
        loaded: dict[Any, Any] = {}
        for key, entry in entries.items():
            target = targets[key]
            if key in new:
                _encode(target, entry, new[key], losses)
            else:
                _flush(target, entry, losses)
            step = torch.tensor(float(entry["step"]), dtype=torch.float32, device=target.weight.device)
            loaded[key] = EncodedEntry({"step": step, **(states[key] or new[key])}, target.host)
    losses.warn()
    groups = keep_32bit.with_own_keys(state_dict["param_groups"], optimizer.param_groups)
    return {**state_dict, "state": loaded, "param_groups": groups}


def _targets(optimizer: StatefulOptimizer, state_dict: dict[str, Any]) -> dict[Any, _Target]:
    """Returns the parameter of each key of the loaded state. ValueError as `load_checks.param_keys`."""
    keys, params = load_checks.param_keys(optimizer, state_dict), params_of(optimizer)
    hosts = optimizer.on_host([p.param for p in params])
    found = {}
    for key, p, host in zip(keys, params, hosts, strict=True):
        if key in state_dict["state"]:
            weight = p.local.weight.detach()
            found[key] = _Target(p, host, weight.cpu() if host else weight)
    return found


def _present_state(target: _Target, entry: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the parameter's present state if the entry consists of its tensors: `state_dict()` has returned them, and
    torch.distributed.checkpoint may have loaded into them. Else None."""
    kinds, own = target.p.kinds, target.p.stored
    if set(entry) != {"step", *kinds.logical()} or not kinds.complete(own):
        return None
    if own[kinds.first].device != target.weight.device:
        return None
    for key, encoded in kinds.logical().items():
        value = local_shard.tensor_of(entry[key])
        if isinstance(value, StateTensor):
            if not value.handle.source.is_in(own, key):
                return None
        elif encoded or not dense.same_memory(value, own[key]):
            return None
    return {key: value for key, value in own.items() if key != "step"}


def _flush(target: _Target, entry: Mapping[str, Any], losses: _Losses) -> None:
    """Completes pending writes to the parameter's present state, which the entry consists of."""
    for key in target.p.kinds.logical():
        value = local_shard.tensor_of(entry[key])
        if isinstance(value, StateTensor):
            value.handle.source.flush()
            if value.handle.source.lossy:
                losses.rounded[key].append(target.p.name)


def _encode(target: _Target, entry: Mapping[str, Any], state: dict[str, Tensor], losses: _Losses) -> None:
    """Encodes an entry into new stored state, key by key. A master that is missing in the entry stays the weight."""
    p, weight, kinds = target.p, target.weight, target.p.kinds
    for key in kinds.logical():
        if key not in entry and key == EMA:
            losses.missing_emas.append(p.name)
            codec.encode(weight, state, kinds, key, _master_of(weight, state, kinds))
            continue
        if key not in entry:
            losses.seeded.append(p.name)
            continue
        value = part(p.param, p.local, entry[key])
        codec.encode(weight, state, kinds, key, value)
        if _is_rounded(target, state, key, value):
            losses.rounded[key].append(p.name)
    if kinds.ema is None and EMA in entry:
        losses.dropped_emas.append(p.name)
    if kinds.master is None and "master_param" in entry:
        given = load_checks.local_ranges(entry["master_param"])
        if not all(same_values(values, values.to(weight.dtype)) for _, values in given):
            losses.dropped.append(p.name)


def _master_of(weight: Tensor, state: dict[str, Tensor], kinds: StateDtypes) -> Tensor:
    return codec.decode(weight, state, kinds, "master_param") if kinds.master else weight


def part(p: Any, local: local_shard.LocalShard, value: Any) -> Tensor:
    """Returns this rank's part of a tensor that was loaded for p, as a plain tensor with the shape and memory order of
    local.weight."""
    if local_shard.is_dtensor(value):
        if tuple(value.placements) != tuple(p.placements):
            with group_calls.translated_over(value.device_mesh, "loading state as it is sharded here"):
                value = value.redistribute(placements=p.placements)
        value = local_shard.tensor_of(value)
        return value.decoded() if isinstance(value, StateTensor) else value
    if isinstance(value, StateTensor):
        if not value.handle.run.whole:
            return value.handle.source.read(0, value.handle.source.numel)
        value = value.decoded()
    if local_shard.is_dtensor(p):
        from torch.distributed.tensor import distribute_tensor

        value = value.to(p.device_mesh.device_type)
        return distribute_tensor(value, p.device_mesh, p.placements, src_data_rank=None).to_local()
    if not local_shard.is_flat_shard(p, local):
        return value
    return dense.in_order_of(p, value).view(-1)[local.offset : local.offset + local.weight.numel()]


def _is_rounded(target: _Target, state: dict[str, Tensor], key: str, value: Tensor) -> bool:
    """Whether encoding `value` into the stored state has changed some element."""
    kinds = target.p.kinds
    if kinds.logical()[key]:
        if key == "master_param":  # 32 638 of the 2^32 numbers become an ulp lower: not worth a warning
            return False
    elif state[key].dtype in (value.dtype, torch.float32):
        return False
    flat = dense.in_order_of(state[kinds.first], value).view(-1)  # may be on another device: a checkpoint of a GPU
    read = ranges(source_of(target.weight, state, kinds, key))
    return not all(
        same_values(values, flat[begin : begin + values.numel()].to(values.device)) for begin, values in read
    )
