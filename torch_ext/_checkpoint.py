"""Between opt.state and state_dict: the hooks by which torch's own saving and loading carry our state.

torch's state_dict hands out what is at rest and its load_state_dict casts tensors to the parameter's dtype, which would
round masters. Both run hooks for everybody; ours come closest to the optimizer.
"""

from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from torch_ext import _groups, _kept, _state, _tensors

if TYPE_CHECKING:
    from torch_ext._optimizer import Adam


class Sealed:
    """State at rest on its way through torch's load_state_dict, which leaves alone what it does not know."""

    def __init__(self, at_rest: dict[str, Any]) -> None:
        self.at_rest = at_rest


def logical(optimizer: "Adam", state_dict: dict[str, Any]) -> dict[str, Any]:
    """At rest -> logical. Parameters that never were trained have no entry, as in torch."""
    decoded: dict[Any, Any] = {}
    rest = dict(state_dict["state"])
    with torch.no_grad():
        for index, p in enumerate(_groups.everyone(optimizer.param_groups)):
            at_rest = rest.pop(index, {})
            if "exp_avg" in at_rest:
                decoded[index] = _state.decode(p, at_rest, _state.kinds_of(optimizer.policy, p.dtype))
    return {**state_dict, "state": {**decoded, **rest}}


def sealed(optimizer: "Adam", state_dict: dict[str, Any]) -> dict[str, Any]:
    """Checks everything, then logical -> at rest. Changes nothing of the optimizer."""
    for key in ("state", "param_groups"):
        if key not in state_dict:
            raise ValueError(f"this is no optimizer's state_dict: of {key!r} there is none in {list(state_dict)}")
    saved, own = state_dict["param_groups"], optimizer.param_groups
    lengths, saved_lengths = ([len(g["params"]) for g in groups] for groups in (own, saved))
    if lengths != saved_lengths:
        raise ValueError(
            f"loaded state dict has parameter groups of {saved_lengths} parameters; the optimizer's, of "
            f"{lengths}, are legal"
        )
    filled = [optimizer.defaults | group for group in saved]
    for i, group in enumerate(filled):
        where = f"loaded state dict, group {i}: "
        _groups.refuse(group, where)
        _groups.refuse_differing(group, filled[0], where)
    targets = dict(
        zip(
            chain.from_iterable(g["params"] for g in saved),
            zip(_groups.everyone(own), _groups.names(own), strict=True),
            strict=True,
        )
    )
    for index, entry in state_dict["state"].items():
        if index not in targets:
            raise ValueError(f"loaded state dict has state for {index!r}, which none of its groups has")
        p, name = targets[index]
        _tensors.refuse_param(p, name)
        _state.refuse(p, entry, f"loaded state dict, state of {name}")
    state: dict[Any, Any] = {}
    with torch.no_grad():
        params = [targets[index][0] for index in state_dict["state"]]
        wanted = [(p.detach(), _state.kinds_of(optimizer.policy, p.dtype)) for p in params]
        made = zip(state_dict["state"].items(), params, wanted, _state.make(wanted), strict=True)
        for (index, entry), p, (weight, kinds), at_rest in made:
            _state.encode(weight, entry, kinds, _kept.peek(optimizer.state, p), at_rest)
            step = torch.tensor(float(entry["step"]), dtype=torch.float32, device=p.device)
            state[index] = Sealed({"step": step, **at_rest})
    return {**state_dict, "state": state}
