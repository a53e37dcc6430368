"""Between opt.state and state_dict: the hooks by which torch's own saving and loading carry our state.

torch's state_dict hands out what is at rest and its load_state_dict casts tensors to the parameter's dtype, which would
round masters. Both run hooks for everybody; ours come closest to the optimizer.
"""

from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torch_ext import _groups, _local, _state, _tensors

if TYPE_CHECKING:
    from torch_ext._optimizer import Adam


class Sealed:
    """State at rest on its way through torch's load_state_dict, which leaves alone what it does not know."""

    def __init__(self, at_rest: dict[str, Any], host: bool) -> None:
        self.at_rest, self.host = at_rest, host


def logical(optimizer: "Adam", state_dict: dict[str, Any]) -> dict[str, Any]:
    """At rest -> logical. Parameters that never were trained have no entry, as in torch."""
    decoded: dict[Any, Any] = {}
    rest = dict(state_dict["state"])
    everyone = _groups.everyone(optimizer.param_groups)
    locals_ = optimizer._current_locals(everyone)
    with torch.no_grad():
        for index, p in enumerate(everyone):
            at_rest = optimizer._host.peek(p, rest.pop(index, {}))
            if "exp_avg" in at_rest:
                kinds = _state.kinds_of(optimizer.policy, p.dtype)
                entry = _state.decode(locals_.of(index).weight, at_rest, kinds)
                decoded[index] = {key: _like(p, value) if key != "step" else value for key, value in entry.items()}
    return {**state_dict, "state": {**decoded, **rest}}


def _like(p: Any, value: Tensor) -> Any:
    """The local part of a tensor that lies like the DTensor p as such a one; any other value as it is."""
    if not _local.is_dtensor(p):
        return value
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(value, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())


def _part(p: Any, local: _local.Local, value: Tensor) -> Tensor:
    """This rank's part of a whole tensor of p's shape."""
    if _local.is_dtensor(value):
        if tuple(value.placements) != tuple(p.placements):  # type: ignore[attr-defined]
            value = value.redistribute(placements=p.placements)  # type: ignore[attr-defined]
        return _local.tensor_of(value)
    if _local.is_dtensor(p):
        from torch.distributed.tensor import distribute_tensor

        value = value.to(p.device_mesh.device_type)
        return distribute_tensor(value, p.device_mesh, p.placements, src_data_rank=None).to_local()
    if local.weight is p:
        return value
    return _tensors.in_order_of(p, value).view(-1)[local.start : local.start + local.weight.numel()]


def consolidated(optimizer: "Adam", state_dict: dict[str, Any], to: int | None) -> dict[str, Any] | None:
    """The parts of all ranks put together: whole tensors, as an optimizer that is not sharded has them. Collective."""
    everyone = _groups.everyone(optimizer.param_groups)
    locals_ = optimizer._current_locals(everyone)
    whole: dict[Any, Any] = {}
    receives = to is None or to == _rank()
    with torch.no_grad():
        for index, entry in state_dict["state"].items():
            p = everyone[index] if isinstance(index, int) and index < len(everyone) else None
            made = {
                key: value if key == "step" or p is None else _whole(p, locals_.of(index), value, to)
                for key, value in entry.items()
            }
            if receives:
                whole[index] = made
    return {**state_dict, "state": whole} if receives else None


def _rank() -> int:
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


def _whole(p: Any, local: _local.Local, value: Any, to: int | None) -> Tensor:
    if _local.is_dtensor(value):
        return value.full_tensor()
    if local.weight is p:
        return value
    whole = _tensors.like(p, value.dtype)
    flat = _tensors.flat(whole).view(-1)
    flat[local.start : local.start + value.numel()] = value
    # Every element is one rank's, and zero bits on the others: bytes can be added.
    for group in local.groups:
        if to is None:
            torch.distributed.all_reduce(flat.view(torch.uint8), group=group)
        else:
            torch.distributed.reduce(flat.view(torch.uint8), dst=to, group=group)
    return whole


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
        _tensors.refuse_param(_local.tensor_of(p), name)
        _state.refuse(p, entry, f"loaded state dict, state of {name}")
    state: dict[Any, Any] = {}
    everyone = _groups.everyone(own)
    position = {id(p): i for i, p in enumerate(everyone)}
    locals_ = optimizer._current_locals(everyone)
    with torch.no_grad():
        params = [targets[index][0] for index in state_dict["state"]]
        local = [locals_.of(position[id(p)]) for p in params]
        host = optimizer._on_host(everyone)
        on_host = [host[position[id(p)]] for p in params]
        weights = [
            one.weight.detach().cpu() if there else one.weight.detach()
            for one, there in zip(local, on_host, strict=True)
        ]
        wanted = [(weight, _state.kinds_of(optimizer.policy, weight.dtype)) for weight in weights]
        made = zip(state_dict["state"].items(), params, local, on_host, wanted, _state.make(wanted), strict=True)
        for (index, entry), p, one, there, (weight, kinds), at_rest in made:
            parts = {key: value if key == "step" else _part(p, one, value) for key, value in entry.items()}
            _state.encode(weight, parts, kinds, optimizer._at_rest(p), at_rest)
            step = torch.tensor(float(entry["step"]), dtype=torch.float32, device=weight.device)
            state[index] = Sealed({"step": step, **at_rest}, there)
    return {**state_dict, "state": state}
