"""Checkpoints of torch.distributed.checkpoint that lack what a state of ours has: those of torch.optim.AdamW, of an
optimizer without masters, of parameters without names.

torch's planner asks a checkpoint for every key of the state dict that is to be loaded, and knows no key that may be
absent. What may be is known here: options of ours, which stay as the optimizer has them, and masters, which are made
from the weights in the checkpoint. A `CheckpointReader` loads such checkpoints; other readers say that it does.
"""

import dataclasses
import functools
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

Plan: TypeAlias = Callable[..., Any]

_PLANNER = "torch.distributed.checkpoint.default_planner"
_FUNCTION = "create_default_local_load_plan"
_ROUTED = "_torch_ext_routed"
_FILLED = "_torch_ext_filled"  # set on metadata that a reader of ours has read
_OPTION = re.compile(r"^(.*?)param_groups\.(.+)\.([^.]+)$")
_OURS = ("moment_rounding", "weight_rounding", "seed", "param_id", "param_names")
_NEWER = ("decoupled_weight_decay",)  # options of torch that a checkpoint of an older one lacks
_MASTER = ".master_param"
_SHOWN = 4


class Absent(NamedTuple):
    """What a checkpoint may lack, and does."""

    options: list[str]
    masters: dict[str, str | None]
    """Each with the key of the weights that it is made from; None: the weights that are there after the load."""

    def __bool__(self) -> bool:
        return bool(self.options or self.masters)


def fill(metadata: Any) -> None:
    """What a checkpoint with this metadata may lack is no error."""
    setattr(metadata, _FILLED, True)


def watch() -> None:
    """From here on torch's planner asks here about keys that are missing, where it has been imported. Again and again
    is as good as once."""
    module = sys.modules.get(_PLANNER)
    theirs = getattr(module, _FUNCTION, None)
    if theirs is not None and not hasattr(theirs, _ROUTED):
        setattr(module, _FUNCTION, _routed(theirs))


def _routed(theirs: Plan) -> Plan:
    @functools.wraps(theirs)
    def create_default_local_load_plan(state_dict: Mapping[str, Any], metadata: Any, strict: bool = True) -> Any:
        absent = absent_in(state_dict, metadata.state_dict_metadata)
        if not absent:
            return theirs(state_dict, metadata, strict)
        if strict and not hasattr(metadata, _FILLED):
            raise RuntimeError(_message(absent))
        rest = {key: value for key, value in state_dict.items() if key not in absent.masters}
        for key in absent.options:
            del rest[key]
        plan = theirs(rest, metadata, strict)
        items = list(plan.items)
        for key, source in absent.masters.items():
            if source is not None:
                items += _reads(key, source, state_dict[key], metadata)
        _warn(absent)
        return dataclasses.replace(plan, items=items)

    setattr(create_default_local_load_plan, _ROUTED, True)
    return create_default_local_load_plan


def absent_in(state_dict: Mapping[str, Any], saved: Mapping[str, Any]) -> Absent:
    """state_dict, saved: by flattened keys, in any nesting."""
    missing = [key for key in state_dict if key not in saved]
    found = Absent([], {})
    if not missing:
        return found
    roots = {m[1] for m in map(_OPTION.match, state_dict) if m is not None and m[3] == "param_id"}
    for key in missing:
        option = _OPTION.match(key)
        if option is not None and option[1] in roots:
            if option[3] in _OURS + _NEWER and any(k.startswith(f"{option[1]}param_groups.") for k in saved):
                found.options.append(key)
        elif key.endswith(_MASTER):
            root = next((r for r in roots if key.startswith(f"{r}state.")), None)
            entry = key.removesuffix(_MASTER)
            if root is not None and f"{entry}.exp_avg" in saved:
                name = _name(entry.removeprefix(f"{root}state."), root, state_dict)
                found.masters[key] = None if name is None else _weights(name, root, state_dict[key], saved)
    return found


def _name(entry: str, root: str, state_dict: Mapping[str, Any]) -> str | None:
    """The name of the parameter that an entry of a state is of, which may be its position; None where it is not
    known."""
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
    """The one key of a checkpoint that is a parameter of that name; None where there is none, or more than one."""
    of_optimizer = (f"{root}state.", f"{root}param_groups.")
    found = [
        key
        for key, value in saved.items()
        if (key == name or key.endswith(f".{name}")) and not key.startswith(of_optimizer)
        if getattr(value, "size", None) == master.size() and value.properties.dtype.is_floating_point
    ]
    return found[0] if len(found) == 1 else None


def _reads(key: str, source: str, master: Any, metadata: Any) -> list[Any]:
    """What is read of the weights into the master."""
    from torch.distributed.checkpoint.planner_helpers import _create_read_items

    from torch_ext.params.local_shard import is_dtensor

    if is_dtensor(master) and master.device_mesh.get_coordinate() is None:
        return []
    items = _create_read_items(source, metadata.state_dict_metadata[source], master)
    return [dataclasses.replace(item, dest_index=dataclasses.replace(item.dest_index, fqn=key)) for item in items]


def _all(keys: list[str]) -> str:
    more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return ", ".join(map(repr, keys[:_SHOWN])) + more


def _message(absent: Absent) -> str:
    return (
        f"Missing key in checkpoint state_dict: {_all([*absent.masters, *absent.options])}. It was saved by "
        "torch.optim.AdamW, without masters or without names of parameters. Pass "
        "storage_reader=torch_ext.CheckpointReader(path) to torch.distributed.checkpoint.load: moments are loaded, "
        "masters are made from the weights, and options that are missing stay as they are. (With any other "
        "storage_reader planner=torch.distributed.checkpoint.DefaultLoadPlanner(allow_partial_load=True) does the "
        "same, and passes over every other key that is missing.)"
    )


def _warn(absent: Absent) -> None:
    made = [key for key, source in absent.masters.items() if source is not None]
    left = [key for key, source in absent.masters.items() if source is None]
    said = [f"the checkpoint has no {_all(made)}: made from the weights in it"] if made else []
    said += [f"the checkpoint has no {_all(left)}: the weight is its master from the next step on"] if left else []
    if said:
        warnings.warn(f"torch_ext: {'; '.join(said)}", stacklevel=2)
