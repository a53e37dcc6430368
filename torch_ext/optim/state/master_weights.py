"""Masters at full precision, to seed, constrain or average them."""

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


def seed(members: Sequence["ParamState"], keys: Sequence[str | int], state_dict: Mapping[str, Any]) -> int:
    """Masters become what the weights were rounded from (semantics.md, D5). Returns how many elements changed.

    members: each with a master. keys: of each, its name. state_dict: a model's; other entries are ignored. ValueError
    or TypeError, naming the key, before anything has changed, where one is missing, has another shape, or does not
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
        _refuse_other(m, master)
    for m in members:
        weight_changes.written(m.changes)  # their checksums will say that they are as the last step left them
    return sum(_install(m, master) for m, master in zip(members, wanted, strict=True))


def _value_of(m: "ParamState", value: Any) -> Tensor:
    """This rank's part of it in fp32, contiguous in the master's memory order."""
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
    return dense.in_order_of(m.master, m.weight.detach().to(m.master.device))


def _refuse_other(m: "ParamState", master: Tensor) -> None:
    stale = torch.zeros(1, dtype=torch.int64, device=master.device)
    ops.call("master_resync_", [_weight_of(m)], [master], stale, False, True)
    if count := int(stale):
        raise ValueError(
            f"{_CALL}: {count} elements of {m.name} do not round to the model's weights; load the same state_dict "
            "into the model first"
        )


def _install(m: "ParamState", master: Tensor) -> int:
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
def opened(members: Sequence["ParamState"], keys: Sequence[str | int]) -> Iterator[dict[str | int, Tensor]]:
    """See Adam.master_weights. members: all that are trained, masters in agreement with weights. keys: of each."""
    gathers = Gathers(members, "master_weights()")
    wide = [_opened(m) for m in members]
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
    """May be called again, where it was interrupted."""
    written = {param: memory.leave() for param, memory in swapped.items()}
    converted: list[tuple[str, Tensor, Tensor]] = []
    for m, master in zip(members, wide, strict=True):
        weight_changes.written(m.changes)
        value = written.get(m.param, master)
        if not _is_like(value, master):
            converted.append((m.name, value, master))
        elif m.kinds.master:
            _close(m, value)
    gathers.run()
    torch.autograd.graph.increment_version([m.param for m in members])
    _refuse_conversions(converted)


def _is_like(value: Tensor, master: Tensor) -> bool:
    return value.dtype == master.dtype and value.shape == master.shape


def _refuse_conversions(converted: Iterable[tuple[str, Tensor, Tensor]]) -> None:
    """ValueError, with names, where code in the block replaced parameters by tensors that cannot be their masters."""
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
    """Whether the parameter itself becomes its master inside the block: not where this rank steps a part of it."""
    return m.kinds.master is not None and m.weight is m.param


def _opened(m: "ParamState") -> Tensor:
    """The master itself where it is stored in fp32, on the parameter's device."""
    if m.kinds.master is None:
        return m.weight.detach()
    return codec.decode(m.weight, m.state, m.kinds, "master_param").to(m.weight.device)


def _close(m: "ParamState", master: Tensor) -> None:
    """The weight becomes its master, rounded to nearest."""
    wide = dense.in_order_of(m.master, master.detach().to(m.master.device))
    weight = torch.empty_like(wide, dtype=m.weight.dtype)
    own = dense.flat(m.master).view(-1)
    if m.kinds.master == "master_remainder":
        ops.call("master_encode_", [wide], [weight], [own])
    else:
        if own.data_ptr() != wide.data_ptr():
            own.copy_(wide.view(-1))
        ops.call("cast_", [wide], [weight], [], [], dense.NONE)
    codec.renew_checksum(weight, m.state, m.kinds)
    m.weight.detach().copy_(dense.view_like(m.master, weight.view(-1), 0))
