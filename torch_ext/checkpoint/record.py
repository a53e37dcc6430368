"""Encodes one tensor as bytes (a record) in the dtypes in which it is stored, and decodes it. Parts are entropy-coded
if that pays. `record_header` documents the format."""

import zlib
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor

from torch_ext.checkpoint.record_header import Part, Place, Record, head_of
from torch_ext.native import planes
from torch_ext.optim.state import at_rest
from torch_ext.tensors import dense

_LEAST = 1 << 10  # bytes of the smallest part that is worth entropy-coding

WeightAt: TypeAlias = Callable[[Place], Tensor]
"""Returns the bf16 weight at a place of the checkpoint."""


# -- writing ------------------------------------------------------------------------------------------------------


def pack(t: Tensor, compress: bool, weight: Tensor | None = None, place: Place | None = None) -> list[Any]:
    """Returns the record of a tensor as buffers to be written one after another. The tensor is strided; it may be a
    state tensor of torch_ext.

    weight, place: if t is an fp32 master, its bf16 weight of the same shape, and where the checkpoint has that weight.
    """
    scaled = at_rest.scaled_of(t)
    if scaled is not None:
        shape, strides = tuple(t.shape), tuple(t.handle.run.strides())  # type: ignore[attr-defined]
        header_fields = {"form": "scaled", "format": scaled.format, "skip": scaled.skip}
        return _pieces(header_fields, torch.float32, shape, strides, scaled[:2], compress)
    values = _plain(t)
    if not dense.is_dense(values):
        values = values.contiguous()
    flat = _flat_memory(values)
    shape, strides = tuple(values.shape), values.stride()
    if weight is not None and place is not None and _may_have_remainder(values, weight):
        of = _flat_memory(dense.in_order_of(values, weight))
        if (found := at_rest.encode_remainder(flat, of)) is not None:
            header_fields = {"form": "beside", "key": place.key, "offsets": place.offsets, "crc": _crc(of)}
            return _pieces(header_fields, torch.float32, shape, strides, found, compress)
    return _pieces({"form": "plain"}, values.dtype, shape, strides, [flat], compress)


def _plain(t: Tensor) -> Tensor:
    """Returns the tensor's values as a plain Tensor on the host."""
    if hasattr(t, "decoded"):
        t = t.decoded()
    return t.detach().as_subclass(Tensor).cpu().resolve_conj().resolve_neg()


def _may_have_remainder(values: Tensor, weight: Tensor) -> bool:
    return values.dtype == torch.float32 and weight.dtype == torch.bfloat16 and values.shape == weight.shape


def _crc(flat: Tensor) -> int:
    return zlib.crc32(_bytes(flat).numpy().data)


def _flat_memory(t: Tensor) -> Tensor:
    """Returns a dense tensor's memory as a tensor of one dimension and stride 1. view(-1) would not do: for a single
    element it keeps any stride."""
    return t.detach().as_strided((t.numel(),), (1,), t.storage_offset())


def _bytes(flat: Tensor) -> Tensor:
    return flat.contiguous().view(torch.uint8)


def _pieces(
    header_fields: dict[str, Any],
    dtype: torch.dtype,
    shape: Sequence[int],
    strides: Sequence[int],
    parts: Sequence[Tensor],
    compress: bool,
) -> list[Any]:
    described, data = [], []
    for part in parts:
        values = _flat_memory(part.detach().cpu().contiguous())
        coded = compress and values.dtype in planes.DTYPES and values.nbytes >= _LEAST
        found = planes.encode(values) if coded else _bytes(values)
        described.append(Part(values.dtype, values.numel(), found.numel(), coded))
        data.append(found.numpy().data)
    return [head_of(header_fields, dtype, shape, strides, described), *data]


# -- reading ------------------------------------------------------------------------------------------------------


def unpack(found: Record, raw: Tensor, weight_at: WeightAt) -> Tensor:
    """Returns the tensor of a record. raw: the record's bytes, uint8. weight_at: returns the bf16 weight of a master,
    in any memory order.

    Raises ValueError if the record is damaged or truncated, or was saved with another weight.
    """
    parts = _parts(found, raw)
    if found.form == "plain":
        flat = parts[0]
    elif found.form == "scaled":
        flat = _decoded_scaled(found, parts)
    else:
        flat = _decode_remainder(found, parts, weight_at)
    if flat.dtype != found.dtype:
        raise ValueError(f"it is {flat.dtype}, and its header says {found.dtype}")
    return flat.as_strided(found.shape, found.strides, flat.storage_offset())


def scaled(found: Record, raw: Tensor) -> at_rest.Scaled:
    """Returns the codes and scales of a record of form "scaled". Raises ValueError as `unpack` does."""
    codes, scales = _parts(found, raw)
    return at_rest.Scaled(codes, scales, found.format, found.skip)


def _parts(found: Record, raw: Tensor) -> list[Tensor]:
    if raw.numel() < found.nbytes:
        raise ValueError(f"it is truncated: {raw.numel()} of {found.nbytes} bytes")
    parts, at = [], found.begin
    for part in found.parts:
        parts.append(_values(part, raw[at : at + part.nbytes]))
        at += part.nbytes
    return parts


def _values(part: Part, raw: Tensor) -> Tensor:
    if not part.coded:
        return raw.clone().view(part.dtype)
    try:
        if (message := planes.read(raw))[:2] != (part.dtype, part.numel):
            raise ValueError(
                f"its coded values are {message.numel} elements in {message.dtype}, and its header says {part.numel} "
                f"in {part.dtype}"
            )
        values = torch.empty(part.numel, dtype=part.dtype, device="cpu")
        planes.decode(raw, 0, values)
    except RuntimeError as error:
        raise ValueError(str(error)) from error
    return values


def _decoded_scaled(found: Record, parts: Sequence[Tensor]) -> Tensor:
    try:
        scaled = at_rest.Scaled(parts[0], parts[1], found.format, found.skip)
        return _flat_memory(at_rest.decode_blocks(scaled, prod(found.shape)))
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"its codes and scales do not fit together ({error})") from error


def _decode_remainder(found: Record, parts: Sequence[Tensor], weight_at: WeightAt) -> Tensor:
    """Returns the fp32 master of a record of form "beside", in memory order."""
    assert found.place is not None
    weight = weight_at(found.place)
    if weight.dtype != torch.bfloat16 or tuple(weight.shape) != found.shape:
        raise ValueError(
            f"it is stored relative to weight {found.place.key!r}, which is {weight.dtype} {tuple(weight.shape)}; "
            f"torch.bfloat16 {found.shape} is legal"
        )
    like = torch.empty_strided(found.shape, found.strides, dtype=weight.dtype, device="cpu")
    of = _flat_memory(dense.in_order_of(like, weight.cpu()))
    if _crc(of) != found.weight_crc:
        raise ValueError(f"it is stored relative to weight {found.place.key!r}, which has changed since this was saved")
    remainder = at_rest.Remainder(parts[0], parts[1], parts[2])
    if [part.dtype for part in parts] != [torch.int16, torch.int64, torch.int32]:
        raise ValueError("its parts do not have the dtypes of a remainder")
    if parts[1].numel() and not 0 <= int(parts[1].min()) <= int(parts[1].max()) < of.numel():
        raise ValueError("its remainder has indices outside of its weight")
    return at_rest.master_of(of, remainder)


def check(found: Record, raw: Tensor) -> None:
    """Compares the checksums of the entropy-coded parts; other parts have none. Raises ValueError if one is wrong."""
    at = found.begin
    for part in found.parts:
        if part.coded:
            try:
                planes.check(raw[at : at + part.nbytes])
            except RuntimeError as error:
                raise ValueError(str(error)) from error
        at += part.nbytes
