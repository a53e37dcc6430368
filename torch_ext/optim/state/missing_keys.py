"""Loads checkpoints of torch.distributed.checkpoint that lack keys of our state: those of torch.optim.AdamW, of an
optimizer without masters, or of parameters without names.

Note: missing keys. torch's load planner makes a read item for every key of the state dict, and none may be missing. But
two kinds of keys of ours may be: options, for which the optimizer keeps its values, and masters (and averages), which
are read from the weights in the checkpoint. So the function that makes a rank's load plan is replaced in torch's module
(`patch_planner`). It fills missing keys only if the metadata is marked, as a `CheckpointReader` does (`allow_missing`);
with any other reader they are an error that names CheckpointReader.
"""

import dataclasses
import functools
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from torch_ext.native import warning
from torch_ext.optim.state.stateful import first_names

_PLANNER = "torch.distributed.checkpoint.default_planner"
_FUNCTION = "create_default_local_load_plan"
_PATCHED = "_torch_ext_patched"
_MAY_LACK = "_torch_ext_may_lack"  # an attribute that marks metadata: missing keys are filled
_OPTION = re.compile(r"^(.*?)param_groups\.(.+)\.([^.]+)$")
_OURS = ("moment_rounding", "weight_rounding", "seed", "param_id", "param_names")  # options that may be missing
_NEWER = ("decoupled_weight_decay",)  # options of torch that checkpoints of an older torch lack
_MASTER = ".master_param"
_MADE_OF_WEIGHTS = (_MASTER, ".ema_param")
_MOMENTS = ("exp_avg", "momentum_buffer")  # every saved state has one of these


class MissingKeys(NamedTuple):
    """The keys that a checkpoint lacks and may lack."""

    options: list[str]
    masters: dict[str, str | None]
    """Key of a master or average -> key of the weights in the checkpoint from which it is made. None: there is no such
    key, and the model's weights after the load are used."""

    def __bool__(self) -> bool:
        return bool(self.options or self.masters)


def allow_missing(metadata: Any) -> None:
    """Marks the metadata of a checkpoint: keys that it may lack are filled."""
    setattr(metadata, _MAY_LACK, True)


def patch_planner() -> None:
    """Patches torch's load planner, if it has been imported, to handle missing keys. May be called again."""
    module = sys.modules.get(_PLANNER)
    theirs = getattr(module, _FUNCTION, None)
    if theirs is not None and not hasattr(theirs, _PATCHED):
        setattr(module, _FUNCTION, _patched(theirs))


def _patched(theirs: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def create_default_local_load_plan(state_dict: Mapping[str, Any], metadata: Any, strict: bool = True) -> Any:
        missing = missing_in(state_dict, metadata.state_dict_metadata)
        if not missing:
            return theirs(state_dict, metadata, strict)
        if strict and not hasattr(metadata, _MAY_LACK):
            raise RuntimeError(_message(missing))
        absent = {*missing.options, *missing.masters}
        plan = theirs({key: value for key, value in state_dict.items() if key not in absent}, metadata, strict)
        items = list(plan.items)
        for key, source in missing.masters.items():
            if source is not None:
                items += _read_items(key, source, state_dict[key], metadata)
        _warn(missing)
        return dataclasses.replace(plan, items=items)

    setattr(create_default_local_load_plan, _PATCHED, True)
    return create_default_local_load_plan


def missing_in(state_dict: Mapping[str, Any], saved: Mapping[str, Any]) -> MissingKeys:
    """Returns the keys of `state_dict` that are not in `saved`, the metadata of a checkpoint. Both have flattened keys,
    with any prefixes; a key that may not be missing is left out."""
    missing = [key for key in state_dict if key not in saved]
    found = MissingKeys([], {})
    if not missing:
        return found
    roots = {m[1] for m in map(_OPTION.match, state_dict) if m is not None and m[3] == "param_id"}
    for key in missing:
        option = _OPTION.match(key)
        if option is not None and option[1] in roots:
            if option[3] in _OURS + _NEWER and any(k.startswith(f"{option[1]}param_groups.") for k in saved):
                found.options.append(key)
        elif key.endswith(_MADE_OF_WEIGHTS):
            root = next((r for r in roots if key.startswith(f"{r}state.")), None)
            entry = key.rpartition(".")[0]
            if root is not None and any(f"{entry}.{moment}" in saved for moment in _MOMENTS):
                name = _name(entry.removeprefix(f"{root}state."), root, state_dict)
                found.masters[key] = None if name is None else _weights(name, root, state_dict[key], saved)
    return found


def _name(entry: str, root: str, state_dict: Mapping[str, Any]) -> str | None:
    """Returns the name of the parameter to which an entry of a state belongs. entry: the parameter's name or position.
    None where the name is not known."""
    if not entry.isdecimal():
        return entry
    names: list[str] = []
    group = 0
    while (position := f"{root}param_groups.{group}.param_id") in state_dict:
        known = state_dict.get(position.removesuffix("param_id") + "param_names")
        if not isinstance(known, list):
            return None
        names += known
        group += 1
    return names[int(entry)] if int(entry) < len(names) else None


def _weights(name: str, root: str, master: Any, saved: Mapping[str, Any]) -> str | None:
    """Returns the key of the parameter `name` in a checkpoint; None where no key fits, or more than one."""
    of_optimizer = (f"{root}state.", f"{root}param_groups.")
    found = [
        key
        for key, value in saved.items()
        if (key == name or key.endswith(f".{name}")) and not key.startswith(of_optimizer)
        if getattr(value, "size", None) == master.size() and value.properties.dtype.is_floating_point
    ]
    return found[0] if len(found) == 1 else None


class _Properties(NamedTuple):
    dtype: Any


class _Described(NamedTuple):
    """Describes a tensor in the form of a checkpoint's metadata."""

    size: Any
    properties: _Properties


def weight_keys_of_masters(state_dict: Mapping[str, Any]) -> dict[str, str]:
    """Returns key of master -> key of weights, for the masters in a flattened state dict that also has the weights."""
    roots = {m[1] for m in map(_OPTION.match, state_dict) if m is not None and m[3] == "param_id"}
    of_optimizer = tuple(f"{root}{part}" for root in roots for part in ("state.", "param_groups."))
    weights = {
        key: _Described(value.size(), _Properties(value.dtype))
        for key, value in state_dict.items()
        if isinstance(value, Tensor) and not key.startswith(of_optimizer)
    }
    found = {}
    for key in state_dict:
        root = next((r for r in roots if key.endswith(_MASTER) and key.startswith(f"{r}state.")), None)
        if root is not None:
            name = _name(key.removesuffix(_MASTER).removeprefix(f"{root}state."), root, state_dict)
            source = None if name is None else _weights(name, root, state_dict[key], weights)
            if source is not None:
                found[key] = source
    return found


def _read_items(key: str, source: str, master: Any, metadata: Any) -> list[Any]:
    """Returns the read items that load the weights `source` of the checkpoint into the master `key`."""
    from torch.distributed.checkpoint.planner_helpers import _create_read_items

    from torch_ext.params.local_shard import is_dtensor

    if is_dtensor(master) and master.device_mesh.get_coordinate() is None:
        return []
    items = _create_read_items(source, metadata.state_dict_metadata[source], master)
    return [dataclasses.replace(item, dest_index=dataclasses.replace(item.dest_index, fqn=key)) for item in items]


def _quoted(keys: list[str]) -> str:
    return first_names(list(map(repr, keys)))


def _message(missing: MissingKeys) -> str:
    return (
        f"Missing key in checkpoint state_dict: {_quoted([*missing.masters, *missing.options])}. It was saved by "
        "torch.optim.AdamW, without masters or without names of parameters. Pass "
        "storage_reader=torch_ext.CheckpointReader(path) to torch.distributed.checkpoint.load: moments are loaded, "
        "masters are made from the weights, and options that are missing stay as they are. (With any other "
        "storage_reader planner=torch.distributed.checkpoint.DefaultLoadPlanner(allow_partial_load=True) does the "
        "same, and passes over every other key that is missing.)"
    )


def _warn(missing: MissingKeys) -> None:
    made = [key for key, source in missing.masters.items() if source is not None]
    left = [key for key, source in missing.masters.items() if source is None]
    said = [f"the checkpoint has no {_quoted(made)}: made from the weights in it"] if made else []
    said += [f"the checkpoint has no {_quoted(left)}: the weight is its master from the next step on"] if left else []
    if said:
        warning.warn("; ".join(said))
