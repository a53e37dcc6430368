"""Masters at full precision: copied from a state_dict, or swapped into the parameters for a while."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torch_ext.native import ops
from torch_ext.native.completion import complete
from torch_ext.optim.state import codec, load, weight_changes
from torch_ext.optim.state.gathers import Gathers
from torch_ext.optim.state.other_memory import OtherMemory
from torch_ext.optim.state.stateful import first_names
from torch_ext.params import param_groups
from torch_ext.tensors import dense

if TYPE_CHECKING:
    from torch_ext.optim.state.param_state import ParamState


_CALL = "resync_masters(state_dict=...)"


def seed_masters(members: Sequence["ParamState"], keys: Sequence[str | int], state_dict: Mapping[str, Any]) -> int:
    """Copies masters from a model's state_dict, from whose values the weights were rounded (docs/specification.md, D5).
    Returns how many elements changed.

    members: each with a master. keys: the name of each. state_dict: its other entries are ignored. ValueError or
    TypeError, naming the key, before anything has changed, where an entry is missing, has another shape, or does not
    round to the weight.
    """
    if nameless := [m.name for m, key in zip(members, keys, strict=True) if not isinstance(key, str)]:
        raise ValueError(
            f"{_CALL} finds masters by name, and this optimizer does not know that of {nameless[0]}: make it from "
            "model.named_parameters()"
        )
    values = {param_groups.logical_name(key): value for key, value in state_dict.items()}
    names = [param_groups.logical_name(str(key)) for key in keys]
    if missing := [name for name in names if name not in values]:
        raise ValueError(
            f"{_CALL}: there is no {', '.join(map(repr, missing[:5]))}{', ...' if missing[5:] else ''} in it; it has "
            f"{', '.join(map(repr, list(state_dict)[:5]))}{', ...' if len(state_dict) > 5 else ''}. The keys of "
            "model.state_dict() are legal"
        )
    wanted = [_value_of(m, values[name]) for m, name in zip(members, names, strict=True)]
    for m, master in zip(members, wanted, strict=True):
        _refuse_mismatch(m, master)
    for m in members:
        weight_changes.mark_written(m.changes)  # checksums will not show this write: they are renewed below
    return sum(_store_master(m, master) for m, master in zip(members, wanted, strict=True))


def _value_of(m: "ParamState", value: Any) -> Tensor:
    """Returns this rank's part of `value` in fp32, contiguous in the master's memory order."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        found = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{_CALL}: {m.name} is {found}; a floating-point tensor is legal")
    if value.shape != m.param.shape:
        raise ValueError(
            f"{_CALL}: {m.name} has shape {tuple(value.shape)}; that of the parameter, {tuple(m.param.shape)}, is legal"
        )
    part = load.part(m.param, m.local, value.detach())
    return dense.in_order_of(m.master, part.to(m.master.device, torch.float32).view(m.master.shape))


def _weight_of(m: "ParamState") -> Tensor:
    """Returns the weight, contiguous in the master's memory order, on the master's device."""
    return dense.in_order_of(m.master, m.weight.detach().to(m.master.device))


def _refuse_mismatch(m: "ParamState", master: Tensor) -> None:
    """Raises ValueError where elements of the given master do not round to the weight."""
    stale = torch.zeros(1, dtype=torch.int64, device=master.device)
    ops.call("master_resync_", [_weight_of(m)], [master], stale, False, True)
    if count := int(stale):
        raise ValueError(
            f"{_CALL}: {count} elements of {m.name} do not round to the model's weights; load the same state_dict "
            "into the model first"
        )


def _store_master(m: "ParamState", master: Tensor) -> int:
    """Stores the given fp32 master; returns how many elements changed."""
    new = master
    if m.kinds.master == "master_remainder":
        new, weight = torch.empty_like(master, dtype=torch.int16), torch.empty_like(master, dtype=m.weight.dtype)
        ops.call("master_encode_", [master], [weight], [new])
    own = dense.flat(m.master).view(-1)
    bits = torch.int16 if m.kinds.master == "master_remainder" else torch.int32
    changed = int((own.view(bits) != new.view(-1).view(bits)).sum())
    own.copy_(new.view(-1))
    codec.renew_checksum(_weight_of(m), m.state, m.kinds)
    return changed


@contextlib.contextmanager
def masters_as_params(members: Sequence["ParamState"], keys: Sequence[str | int]) -> Iterator[dict[str | int, Tensor]]:
    """See Adam.master_weights. members: all trainable parameters; their masters round to their weights. keys: of
    each."""
    gathers = Gathers(members, "master_weights()")
    wide = [_fp32_master(m) for m in members]
    swapped = {m.param: OtherMemory(m.param, master) for m, master in zip(members, wide, strict=True) if _swaps(m)}
    try:
        for memory in swapped.values():
            memory.enter()
        yield dict(zip(keys, wide, strict=True))
    finally:
        complete(lambda: _leave(members, wide, swapped, gathers))


def _leave(
    members: Sequence["ParamState"], wide: Sequence[Tensor], swapped: Mapping[Tensor, OtherMemory], gathers: Gathers
) -> None:
    """Restores the parameters, and takes the masters over. May be called again where it was interrupted."""
    written = {param: memory.leave() for param, memory in swapped.items()}
    converted: list[tuple[str, Tensor, Tensor]] = []
    for m, master in zip(members, wide, strict=True):
        weight_changes.mark_written(m.changes)
        value = written.get(m.param, master)
        if not _is_like(value, master):
            converted.append((m.name, value, master))
        elif m.kinds.master:
            _write_back(m, value)
    gathers.run()
    torch.autograd.graph.increment_version([m.param for m in members])
    _refuse_conversions(converted)


def _is_like(value: Tensor, master: Tensor) -> bool:
    return value.dtype == master.dtype and value.shape == master.shape


def _refuse_conversions(converted: Iterable[tuple[str, Tensor, Tensor]]) -> None:
    """Raises ValueError, with names, where code in the block has converted parameters, which cannot be masters then."""
    found = [
        f"{name} ({tuple(value.shape)} in {value.dtype}; {tuple(master.shape)} in {master.dtype} is legal)"
        for name, value, master in converted
    ]
    if found:
        raise ValueError(
            f"within master_weights() parameters were converted: {first_names(found)}. Their weights and masters are "
            "again what they were before it; changes to other parameters are kept"
        )


def _swaps(m: "ParamState") -> bool:
    """Whether the parameter itself becomes its master inside the block: not if it is a DTensor, or if this rank steps a
    part of it."""
    return m.kinds.master is not None and m.weight is m.param


def _fp32_master(m: "ParamState") -> Tensor:
    """Returns the fp32 master on the parameter's device: the stored tensor itself where possible."""
    if m.kinds.master is None:
        return m.weight.detach()
    return codec.decode(m.weight, m.state, m.kinds, "master_param").to(m.weight.device)


def _write_back(m: "ParamState", master: Tensor) -> None:
    """Stores the given fp32 master, and sets the weight to it, rounded to nearest."""
    wide = dense.in_order_of(m.master, master.detach().to(m.master.device))
    weight = torch.empty_like(wide, dtype=m.weight.dtype)
    own = dense.flat(m.master).view(-1)
    if m.kinds.master == "master_remainder":
        ops.call("master_encode_", [wide], [weight], [own])
    else:
        if own.data_ptr() != wide.data_ptr():
            own.copy_(wide.view(-1))
        ops.call("cast_", [wide], [weight], [], [], dense.EMPTY)
    codec.renew_checksum(weight, m.state, m.kinds)
    m.weight.detach().copy_(dense.view_like(m.master, weight.view(-1), 0))
