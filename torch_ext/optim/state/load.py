"""Between state_dict and opt.state: the hook by which torch's own loading carries our state.

torch's load_state_dict casts tensors to the parameter's dtype, which would round masters; ours checks everything,
encodes, and hands on what torch leaves alone. It comes closest to the optimizer of all such hooks.
"""

import warnings
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_ext.comm import group_calls
from torch_ext.grads.errors import names_of
from torch_ext.optim.state import codec
from torch_ext.optim.state.save import is_cut
from torch_ext.optim.state.sources import EncodedState, same_values, stretches
from torch_ext.optim.state.state_tensor import StateTensor
from torch_ext.optim.state.stateful import StatefulOptimizer
from torch_ext.params import hyper_parameters, local_shard, param_groups
from torch_ext.tensors import dense

_SHOWN = 4


class Losses:
    """Collects them, by parameter."""

    def __init__(self) -> None:
        self._rounded: dict[str, list[str]] = {}
        self._dropped: list[str] = []
        self._seeded: list[str] = []

    def rounded(self, key: str, name: str) -> None:
        """Of some element something was rounded off."""
        self._rounded.setdefault(key, []).append(name)

    def dropped(self, name: str) -> None:
        """The parameter has no master, and the saved one is more than its weight can hold."""
        self._dropped.append(name)

    def seeded(self, name: str) -> None:
        """The parameter has a master, and none was saved."""
        self._seeded.append(name)

    def warn(self) -> None:
        """One warning, where there is something to say."""
        said = [
            f"{key} of {_all(names)} was saved in more bits than the policy keeps, and is rounded to those"
            for key, names in self._rounded.items()
        ]
        if self._dropped:
            said.append(f"master_param of {_all(self._dropped)} is dropped: the policy keeps the weight only")
        if self._seeded:
            said.append(f"there is no master_param of {_all(self._seeded)}: the weight is its master from now on")
        if said:
            warnings.warn(f"torch_ext: of the loaded state {'; '.join(said)}", stacklevel=2)


def _all(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


class EncodedEntry:
    """State at rest on its way through torch's load_state_dict, which leaves alone what it does not know."""

    def __init__(self, at_rest: dict[str, Any], host: bool) -> None:
        self.at_rest, self.host = at_rest, host


class _Target(NamedTuple):
    """A parameter that an entry of the loaded state is for."""

    param: Any
    name: str
    local: local_shard.LocalShard
    weight: Tensor  # of local, detached, where the state is to lie
    kinds: codec.StateDtypes
    own: Mapping[str, Any]  # the state that it has
    host: bool  # whether it is stepped on the host


def encode_for_load(optimizer: StatefulOptimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Checks everything, then logical -> at rest. Changes nothing of the optimizer."""
    targets = _targets(optimizer, state_dict)
    entries = {}
    for index, given in state_dict["state"].items():
        target = targets[index]
        where = f"loaded state dict, state of {target.name}"
        entries[index] = entry = _without_keys_at_rest(target, given, where)
        dense.refuse_param(local_shard.tensor_of(target.param), target.name)
        codec.refuse(target.param, entry, where)
        _refuse_cut_otherwise(target, entry, where)
        _refuse_master(target, entry, where)
    losses = Losses()
    with dense.to_stay():
        kept = {index: _own(targets[index], entry) for index, entry in entries.items()}
        missing = [index for index, at_rest in kept.items() if at_rest is None]
        for index, made in zip(
            missing, codec.make([(targets[i].weight, targets[i].kinds) for i in missing]), strict=True
        ):
            kept[index] = made
        state: dict[Any, Any] = {}
        for index, entry in entries.items():
            target, at_rest = targets[index], kept[index]
            assert at_rest is not None
            if index in missing:
                _encode(target, entry, at_rest, losses)
            else:
                _settle(target, entry, losses)
            step = torch.tensor(float(entry["step"]), dtype=torch.float32, device=target.weight.device)
            state[index] = EncodedEntry({"step": step, **at_rest}, target.host)
    losses.warn()
    return {**state_dict, "state": state}


def _without_keys_at_rest(target: _Target, entry: Mapping[str, Any], where: str) -> dict[str, Any]:
    """torch looks into opt.state for the keys of a flattened state dict, and makes {} of those that it does not find.
    ValueError where it found one too few."""
    found = {key: value for key, value in entry.items() if key in codec.LOGICAL or value != {}}
    if len(found) != len(entry) and (absent := [key for key in target.kinds.logical() if key not in found]):
        raise ValueError(
            f"{where} has no {absent[0]!r}: state that is encoded at rest cannot be loaded with "
            "StateDictOptions(flatten_optimizer_state_dict=True), leave that out"
        )
    return found


def _targets(optimizer: StatefulOptimizer, state_dict: dict[str, Any]) -> dict[Any, _Target]:
    """What each key of the loaded state is for. ValueError unless groups and keys are the optimizer's."""
    for key in ("state", "param_groups"):
        if key not in state_dict:
            raise ValueError(f"this is no optimizer's state_dict: of {key!r} there is none in {list(state_dict)}")
    saved, own = state_dict["param_groups"], optimizer.param_groups
    _refuse_other_names(saved, own)
    lengths, saved_lengths = ([len(g["params"]) for g in groups] for groups in (own, saved))
    if lengths != saved_lengths:
        raise ValueError(
            f"loaded state dict has parameter groups of {saved_lengths} parameters; the optimizer's, of "
            f"{lengths}, are legal"
        )
    filled = [optimizer.defaults | group for group in saved]
    for i, group in enumerate(filled):
        where = f"loaded state dict, group {i}: "
        hyper_parameters.refuse(group, where)
        hyper_parameters.refuse_differing(group, filled[0], where)
    keys = list(chain.from_iterable(g["params"] for g in saved))
    for index in state_dict["state"]:
        if index not in keys:
            raise ValueError(f"loaded state dict has state for {index!r}, which none of its groups has")
    everyone, names = param_groups.everyone(own), param_groups.names(own)
    locals_ = optimizer.current_shards(everyone)
    found = {}
    for key, p, name, i, host in zip(keys, everyone, names, range(len(keys)), optimizer.on_host(everyone), strict=True):
        if key in state_dict["state"]:
            local, kinds = locals_.of(i), codec.kinds_of(optimizer.policy, p.dtype)
            weight = local.weight.detach()
            found[key] = _Target(
                p, name, local, weight.cpu() if host else weight, kinds, optimizer.state_at_rest(p), host
            )
    return found


def _refuse_other_names(saved: list[dict[str, Any]], own: list[dict[str, Any]]) -> None:
    """ValueError for the state of another architecture, where both sides know the names of their parameters."""
    theirs, ours = _known_names(saved), _known_names(own)
    if theirs is None or ours is None:
        return
    absent, unknown = [n for n in ours if n not in set(theirs)], [n for n in theirs if n not in set(ours)]
    if absent or unknown:
        what = [f"it has nothing for {names_of(absent, range(len(absent)))}"] if absent else []
        what += [f"the optimizer does not have its {names_of(unknown, range(len(unknown)))}"] if unknown else []
        raise ValueError(f"loaded state dict is of another architecture: {'; '.join(what)}")
    for ours_of, theirs_of in ((a, b) for a, b in zip(ours, theirs, strict=True) if a != b):
        raise ValueError(
            f"loaded state dict has its parameters in another order: {theirs_of!r} where the optimizer has "
            f"{ours_of!r}; groups with the same parameters in the same order are legal"
        )


def _known_names(groups: list[dict[str, Any]]) -> list[str] | None:
    found: list[str] = []
    for group in groups:
        names = group["params"] if all(isinstance(p, str) for p in group["params"]) else group.get("param_names")
        if names is None or len(names) != len(group["params"]):
            return None
        found += map(param_groups.logical_name, names)
    return found


def _refuse_cut_otherwise(target: _Target, entry: Mapping[str, Any], where: str) -> None:
    """ValueError where values are a rank's part of a tensor that is not the part that is wanted."""
    start, numel = target.local.start, target.weight.numel()
    for key, value in entry.items():
        if isinstance(value, StateTensor) and not value._held.run.whole:
            run = value._held.run
            if not is_cut(target.param, target.local) or (run.start, run.numel) != (start, numel):
                raise ValueError(
                    f"{where}: {key} is elements [{run.start}, {run.stop}) of a tensor that was cut over other ranks, "
                    f"and this rank wants [{start}, {start + numel}): load whole tensors (consolidate_state_dict), or "
                    "through torch.distributed.checkpoint"
                )


def _refuse_master(target: _Target, entry: Mapping[str, Any], where: str) -> None:
    """ValueError for a master that is no number: every step from it would be none."""
    if target.kinds.master is None or "master_param" not in entry:
        return
    for begin, values in _stretches_of(entry["master_param"]):
        finite = torch.isfinite(values)
        if not bool(finite.all()):
            at = begin + int(finite.logical_not().nonzero()[0])
            raise ValueError(
                f"{where}: master_param has {values[at - begin].item()} (element {at} of what was given, in memory "
                "order); finite numbers are legal"
            )


def _stretches_of(value: Any) -> Iterator[tuple[int, Tensor]]:
    """The elements that there are on this rank, some at a time, flat and in memory order, and where they begin."""
    value = local_shard.tensor_of(value)
    if isinstance(value, StateTensor):
        for begin, end in stretches(value._held.source.numel):
            yield begin, value._held.source.read(begin, end)
    else:
        flat = dense.contiguous(value.detach()).view(-1)
        for begin, end in stretches(flat.numel()):
            yield begin, flat[begin:end]


def _own(target: _Target, entry: Mapping[str, Any]) -> dict[str, Any] | None:
    """The state that the parameter has, where it is what the entry holds: handed out, and maybe written in place."""
    kinds, own = target.kinds, target.own
    if set(entry) != {"step", *kinds.logical()} or not codec.complete(own, kinds):
        return None
    if own["exp_avg"].device != target.weight.device:
        return None
    for key, encoded in kinds.logical().items():
        value = local_shard.tensor_of(entry[key])
        if isinstance(value, StateTensor):
            if not value._held.source.is_in(own, key):
                return None
        elif encoded or not dense.same_memory(value, own[key]):
            return None
    return {key: value for key, value in own.items() if key != "step"}


def _settle(target: _Target, entry: Mapping[str, Any], losses: Losses) -> None:
    for key in target.kinds.logical():
        value = local_shard.tensor_of(entry[key])
        if isinstance(value, StateTensor):
            value._held.source.settle()
            if value._held.source.lossy:
                losses.rounded(key, target.name)


def _encode(target: _Target, entry: Mapping[str, Any], at_rest: dict[str, Tensor], losses: Losses) -> None:
    """Into state as it was made, one key at a time."""
    name, local, weight, kinds = target.name, target.local, target.weight, target.kinds
    for key, encoded in kinds.logical().items():
        if key not in entry:
            losses.seeded(name)
            continue
        value = part(target.param, local, entry[key])
        codec.encode(weight, {key: value}, kinds, {}, at_rest)
        if not _survived(weight, at_rest, kinds, key, encoded, value):
            losses.rounded(key, name)
    if kinds.master is None and "master_param" in entry:
        given = _stretches_of(entry["master_param"])
        if not all(same_values(values, values.to(weight.dtype)) for _, values in given):
            losses.dropped(name)


def part(p: Any, local: local_shard.LocalShard, value: Any) -> Tensor:
    """This rank's part of what was loaded for p, as a plain tensor that lies like local.weight."""
    if local_shard.is_dtensor(value):
        if tuple(value.placements) != tuple(p.placements):
            with group_calls.translated_over(value.device_mesh, "loading state as it is sharded here"):
                value = value.redistribute(placements=p.placements)
        value = local_shard.tensor_of(value)
        return value._held.decoded() if isinstance(value, StateTensor) else value
    if isinstance(value, StateTensor):
        held = value._held
        if not held.run.whole:
            return held.source.read(0, held.source.numel)
        value = held.decoded()
    if local_shard.is_dtensor(p):
        from torch.distributed.tensor import distribute_tensor

        value = value.to(p.device_mesh.device_type)
        return distribute_tensor(value, p.device_mesh, p.placements, src_data_rank=None).to_local()
    if not is_cut(p, local):
        return value
    return dense.in_order_of(p, value).view(-1)[local.start : local.start + local.weight.numel()]


def _survived(
    weight: Tensor, at_rest: dict[str, Tensor], kinds: codec.StateDtypes, key: str, encoded: bool, value: Tensor
) -> bool:
    """Whether what is at rest now has the same values."""
    if key == "master_param" and encoded:
        return True  # of 2^32 numbers 32 638 are an ulp lower: nothing that anybody has to be told
    if not encoded:
        kept = at_rest[key]
        if kept.dtype in (value.dtype, torch.float32):
            return True
        flat = dense.in_order_of(kept, value).view(-1)
        return all(same_values(dense.flat(kept).view(-1)[b:e], flat[b:e]) for b, e in stretches(flat.numel()))
    flat = dense.in_order_of(at_rest[key], value).view(-1)
    source = EncodedState(weight, at_rest, kinds, key)
    return all(same_values(source.read(b, e), flat[b:e]) for b, e in stretches(flat.numel()))
