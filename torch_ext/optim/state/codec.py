"""Creates the stored state of a parameter, decodes it to logical values, and encodes these (see `state_dtypes`)."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_ext.native import constants, ops
from torch_ext.optim.state.state_dtypes import EMA, EMA_PLANES, FORMATS, GRAIN, MASTERS, StateDtypes
from torch_ext.tensors import dense

_NO_COUNT = torch.empty(0, dtype=torch.int64, device="cpu")


def make(wanted: Sequence[tuple[Tensor, StateDtypes]]) -> list[dict[str, Tensor]]:
    """Returns new stored state for each parameter, without the step: moments are zero, master and average are the
    weight. States of small parameters share memory (see `dense.zeros_like`)."""
    parts = [_parts(p, kinds) for p, kinds in wanted]
    # Allocate key by key: tensors of one key are then adjacent in memory, and the operator checks them as one range.
    keys = (*FORMATS, "scales", *MASTERS, EMA, *EMA_PLANES, "checksum")
    present = [(i, key) for key in keys for i, part in enumerate(parts) if key in part]
    states: list[dict[str, Tensor]] = [{} for _ in wanted]
    for (i, key), made in zip(present, dense.zeros_like([parts[i][key] for i, key in present]), strict=True):
        states[i][key] = made
    for (p, kinds), state in zip(wanted, states, strict=True):
        if kinds.master == "master_param":
            state["master_param"].copy_(p)  # a remainder of 0 is exactly the weight
        if kinds.master:
            renew_checksum(dense.in_order_of(state[kinds.master], p.detach()), state, kinds)
        if kinds.ema is not None:
            encode(p, state, kinds, EMA, p.detach())
    return states


def _parts(p: Tensor, kinds: StateDtypes) -> dict[str, tuple[Tensor, torch.dtype]]:
    """Returns for each stored tensor except the step its dtype, and a tensor that has its shape and device."""
    shaped = {key: (p, dtype) for key, dtype in kinds.shaped().items()}
    counted = kinds.blockwise(p.numel()).items()
    return shaped | {key: (torch.empty(1, device=p.device).expand(count), dtype) for key, (count, dtype) in counted}


def follow_param(p: Tensor, state: dict[str, Any], kinds: StateDtypes, name: str) -> None:
    """Converts complete stored state to p's current memory order (channels_last, say), and recomputes its checksum if
    p's size has changed. Raises ValueError where shapes or dtypes of the state do not fit p.
    """
    shaped = kinds.shaped()
    for key, dtype in shaped.items():
        if state[key].dtype != dtype or state[key].shape != p.shape:
            raise ValueError(
                f"{name} is {tuple(p.shape)} in {p.dtype}, so its {key} must be {tuple(p.shape)} in {dtype}; it is "
                f"{tuple(state[key].shape)} in {state[key].dtype}. A model that was converted after its optimizer took "
                "steps needs a new optimizer"
            )
    if kinds.master:
        _fit_checksum(p, state, kinds)
    contiguous = not dense.is_dense(p)
    if all(state[key].is_contiguous() if contiguous else dense.same_order(state[key], p) for key in shaped):
        return
    p = p.to(state[kinds.first].device)  # the state may be on the host
    (moved,) = make([(p, kinds)])
    for key in kinds.logical():
        encode(p, moved, kinds, key, decode(p, state, kinds, key))
    state.update(moved)


def _fit_checksum(p: Tensor, state: dict[str, Any], kinds: StateDtypes) -> None:
    """Recomputes the checksum where parameter and state were cut to another shape together, as pruning does."""
    assert kinds.master is not None
    count, _ = kinds.blockwise(p.numel())["checksum"]
    if state["checksum"].shape != (count,):
        state["checksum"] = torch.zeros(count, dtype=torch.int64, device=state["checksum"].device)
        weight = p.detach().to(state["checksum"].device)
        renew_checksum(dense.in_order_of(state[kinds.master], weight), state, kinds)


def renew_checksum(weight: Tensor, state: Mapping[str, Any], kinds: StateDtypes) -> None:
    """Sets the checksum to that of `weight`, which is contiguous in the master's memory order."""
    assert kinds.master is not None
    masters, checksums = [dense.flat(state[kinds.master])], [state["checksum"]]
    ops.call("master_checksum_", [weight], masters, checksums, _NO_COUNT, constants.CHECKSUM_RENEW)


def state_slice(state: Mapping[str, Any], kinds: StateDtypes, begin: int, end: int) -> dict[str, Tensor]:
    """Returns views of complete stored state, without the step: of elements [begin, end) in memory order. `decode` and
    `encode` take them together with that slice of the weight. begin and end are multiples of GRAIN, or end is the
    parameter's numel."""
    found = {key: dense.flat(state[key]).view(-1)[begin:end] for key in kinds.shaped()}
    if kinds.master == "master_remainder":
        found["checksum"] = state["checksum"][begin // GRAIN : -(-end // GRAIN)]
    if kinds.scale_rows:
        found["scales"] = _scale_rows(state, kinds)[:, begin // constants.BLOCK : -(-end // constants.BLOCK)]
    return found


def _scale_rows(state: Mapping[str, Tensor], kinds: StateDtypes) -> Tensor:
    """Returns `scales` as a view with one row for each block-scaled moment."""
    return state["scales"].view(kinds.scale_rows, -(-state[kinds.first].numel() // constants.BLOCK))


def scales_of(state: Mapping[str, Tensor], kinds: StateDtypes, moment: str) -> Tensor:
    """Returns the scales of a block-scaled moment, as a view."""
    return _scale_rows(state, kinds)[kinds.scaled.index(moment)]


def _cast(source: Tensor, target: Tensor, source_scales: list[Tensor], target_scales: list[Tensor], form: int) -> None:
    options = (dense.EMPTY, form, constants.NEAREST, 0, 0)
    ops.call("cast_", [source], [target], source_scales, target_scales, *options)


def decode(p: Tensor, state: Mapping[str, Any], kinds: StateDtypes, key: str) -> Tensor:
    """Returns the logical tensor `key` (one of `kinds.logical()`): the stored tensor itself if it is stored in its
    logical form, else a new one. p: the weights that the state belongs to."""
    if not kinds.logical()[key]:
        return state[key]
    if key in FORMATS:
        value = dense.unpooled_like(state[key], torch.float32)
        _cast(dense.flat(state[key]), dense.flat(value), [scales_of(state, kinds, key)], [], FORMATS[key])
        return value
    if key == EMA:
        return _join_planes(state["ema_upper"], state["ema_lower"])
    stored = state["master_remainder"]
    weight = dense.in_order_of(stored, p.detach().to(stored.device))
    master = dense.unpooled_like(stored, torch.float32)
    ops.call("master_decode_", [weight], [dense.flat(_valid_remainder(weight, state))], [dense.flat(master)])
    return master


def _valid_remainder(weight: Tensor, state: Mapping[str, Any]) -> Tensor:
    """Returns the remainders that fit the current weight. In blocks where the weight was modified outside the optimizer
    (an average was swapped in, say) they are 0, so that the weight is its own master."""
    remainder, stale = state["master_remainder"], torch.zeros(1, dtype=torch.int64, device=weight.device)
    masters, checksums = [dense.flat(remainder)], [state["checksum"]]
    ops.call_unversioned("master_checksum_", [weight], masters, checksums, stale, constants.CHECKSUM_CHECK)
    if not int(stale):
        return remainder
    remainder, checksum = remainder.clone(), state["checksum"].clone()
    ops.call("master_checksum_", [weight], [dense.flat(remainder)], [checksum], _NO_COUNT, constants.CHECKSUM_RESYNC)
    return remainder


def encode(p: Tensor, state: Mapping[str, Tensor], kinds: StateDtypes, key: str, value: Tensor) -> None:
    """Writes the logical `value` of one of `kinds.logical()` to the stored state. p is only read."""
    if not kinds.logical()[key]:
        state[key].copy_(value)
    elif key in FORMATS:
        wide = dense.in_order_of(state[key], value.to(device=p.device, dtype=torch.float32))
        _cast(wide, dense.flat(state[key]), [], [scales_of(state, kinds, key)], FORMATS[key])
    elif key == EMA:
        _split_planes(
            value.to(device=state["ema_upper"].device, dtype=torch.float32), state["ema_upper"], state["ema_lower"]
        )
    else:
        remainder = state["master_remainder"]
        wide = dense.in_order_of(remainder, value.to(device=p.device, dtype=torch.float32))
        # The operator also writes the rounded weight. It gets a temporary instead of p: loading changes no weight.
        weight = torch.empty(wide.shape, dtype=p.dtype, device=p.device)
        ops.call("master_encode_", [wide], [weight], [dense.flat(remainder)])
        renew_checksum(weight, state, kinds)


def _join_planes(upper: Tensor, lower: Tensor) -> Tensor:
    """Returns the fp32 values of 24-bit numbers in two planes: the upper 16 bits and the 8 bits that follow."""
    bits = upper.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
    return bits.bitwise_or_(lower.to(torch.int32).bitwise_left_shift_(8)).view(torch.float32)


def _split_planes(value: Tensor, upper: Tensor, lower: Tensor) -> None:
    """Rounds fp32 values to 24 bits (nearest, ties to even), and writes them to two planes: undoes `_join_planes`."""
    bits = value.view(torch.int32)
    rounded = torch.where(torch.isfinite(value), bits + 0x7F + ((bits >> 8) & 1), bits)
    upper.copy_((rounded >> 16).to(torch.int16).view(torch.bfloat16))
    lower.copy_((rounded >> 8) & 0xFF)
