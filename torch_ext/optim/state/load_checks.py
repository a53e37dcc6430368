"""The checks of a loaded state_dict, which run before anything has changed."""

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from torch_ext.grads.errors import names_of
from torch_ext.optim.state.sources import PlainState, ranges
from torch_ext.optim.state.state_dtypes import EMA, LOGICAL
from torch_ext.optim.state.state_tensor import StateTensor
from torch_ext.optim.state.stateful import StatefulOptimizer, StatefulParam, first_names
from torch_ext.params import hyper_parameters, local_shard, param_groups
from torch_ext.tensors import dense


def param_keys(optimizer: StatefulOptimizer, state_dict: dict[str, Any]) -> list[Any]:
    """Returns each parameter's key in the loaded state. ValueError where groups or keys do not fit the optimizer."""
    for key in ("state", "param_groups"):
        if key not in state_dict:
            found = first_names(list(map(repr, state_dict))) or "nothing"
            raise ValueError(f"this is not the state_dict of an optimizer: it has no {key!r}, but {found}")
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
        if group.get("amsgrad"):
            raise _amsgrad_error(f"loaded state dict, group {i}")
        optimizer.refuse_hyper(group, where)
        hyper_parameters.refuse_differing(group, filled[0], where)
    keys = list(chain.from_iterable(g["params"] for g in saved))
    for index in state_dict["state"]:
        if index not in keys:
            raise ValueError(f"loaded state dict has state for {index!r}, which none of its groups has")
    return keys


def _refuse_other_names(saved: list[dict[str, Any]], own: list[dict[str, Any]]) -> None:
    """Raises ValueError for the state of another architecture, if both sides know the names of their parameters."""
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
    """Returns the names of all parameters; None if a group lacks them."""
    found: list[str] = []
    for group in groups:
        names = group["params"] if all(isinstance(p, str) for p in group["params"]) else group.get("param_names")
        if names is None or len(names) != len(group["params"]):
            return None
        found += map(param_groups.logical_name, names)
    return found


def checked_entry(p: StatefulParam, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the loaded entry of p, without keys that torch added. Raises ValueError or TypeError unless it is the
    logical state of a parameter like p, whole or this rank's part, with a finite master."""
    where = f"loaded state dict, state of {p.name}"
    entry = _without_empty(p, given, where)
    dense.refuse_param(local_shard.tensor_of(p.param), p.name)
    if p.kinds.matrix:  # torch.optim.Muon counts no steps
        entry.setdefault("step", 0.0)
    _refuse_keys(p, entry, where)
    _refuse_values(p.param, entry, where)
    _refuse_other_part(p, entry, where)
    _refuse_master(p, entry, where)
    return entry


def _without_empty(p: StatefulParam, given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns the entry without stored keys such as `master_remainder`. Loading a flattened state dict, torch looks for
    the keys that opt.state has, and puts {} where the dict does not have one. ValueError where a logical key is then
    missing."""
    found = {key: value for key, value in given.items() if key in LOGICAL or value != {}}
    if len(found) != len(given) and (absent := [key for key in p.kinds.logical() if key not in found]):
        raise ValueError(
            f"{where} has no {absent[0]!r}: state that is encoded at rest cannot be loaded with "
            "StateDictOptions(flatten_optimizer_state_dict=True), leave that out"
        )
    return found


def _refuse_keys(p: StatefulParam, entry: Mapping[str, Any], where: str) -> None:
    """Raises ValueError for keys that are missing, or not legal for a parameter that is stepped as p is."""
    legal = ("step", *p.kinds.moments)
    kind = "a matrix of Muon's" if p.kinds.matrix else "an Adam"
    for key in legal:
        if key not in entry:
            raise ValueError(
                f"{where} has no {key!r}; the state of {kind} has {', '.join(legal)} (and master_param), this "
                f"one has {', '.join(map(str, entry)) or 'nothing'}"
            )
    for key in entry:
        if key == "max_exp_avg_sq":
            raise _amsgrad_error(where)
        if key not in LOGICAL:
            raise ValueError(f"{where} has {key!r}; the state of {kind} has {', '.join(legal)} (and master_param)")
        if key not in (*legal, "master_param", EMA):
            raise ValueError(
                f"{where} has {key!r}; the state of {kind} has {', '.join(legal)} (and master_param). A parameter "
                "whose algorithm changed needs a new optimizer, or a state that fits it"
            )


def _amsgrad_error(where: str) -> ValueError:
    return ValueError(f"{where} was saved with amsgrad=True, which torch_ext does not have; resume with torch.optim")


def _refuse_values(param: Any, entry: Mapping[str, Any], where: str) -> None:
    """Raises TypeError or ValueError for values with an illegal dtype or shape, and for an illegal step."""
    for key, value in entry.items():
        if key == "step":
            continue
        if not isinstance(value, Tensor) or not value.is_floating_point():
            found = str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"{where}: {key} is {found}; a floating-point tensor (a logical state, decoded) is legal")
        if value.shape != param.shape:
            raise ValueError(
                f"{where}: {key} has shape {tuple(value.shape)} and the parameter has {tuple(param.shape)}; equal "
                "shapes are legal"
            )
    step = float(entry["step"])
    if not 0 <= step < 2**24 or step != int(step):
        raise ValueError(f"{where}: step is {step}; a whole number in [0, 2^24) is legal")


def _refuse_other_part(p: StatefulParam, entry: Mapping[str, Any], where: str) -> None:
    """Raises ValueError where a value is a rank's part of a tensor, but not the part that this rank steps."""
    start, numel = p.local.offset, p.local.weight.numel()
    for key, value in entry.items():
        if isinstance(value, StateTensor) and not value.handle.run.whole:
            run = value.handle.run
            if not p.flat_shard or (run.start, run.numel) != (start, numel):
                raise ValueError(
                    f"{where}: {key} is elements [{run.start}, {run.stop}) of a tensor that was sharded over other "
                    f"ranks, and this rank needs [{start}, {start + numel}): load whole tensors "
                    "(consolidate_state_dict), or through torch.distributed.checkpoint"
                )


def _refuse_master(p: StatefulParam, entry: Mapping[str, Any], where: str) -> None:
    """Raises ValueError for a master with NaN or Inf, from which every step would compute NaN or Inf."""
    if p.kinds.master is None or "master_param" not in entry:
        return
    for begin, values in local_ranges(entry["master_param"]):
        finite = torch.isfinite(values)
        if not bool(finite.all()):
            at = begin + int(finite.logical_not().nonzero()[0])
            raise ValueError(
                f"{where}: master_param has {values[at - begin].item()} (element {at} of what was given, in memory "
                "order); finite numbers are legal"
            )


def local_ranges(value: Any) -> Iterator[tuple[int, Tensor]]:
    """Yields the elements of a loaded tensor that are on this rank, as `sources.ranges` does."""
    value = local_shard.tensor_of(value)
    if isinstance(value, StateTensor):
        return ranges(value.handle.source)
    return ranges(PlainState(dense.contiguous(value.detach()).view(-1)))
