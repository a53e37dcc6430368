"""One tensor at rest, as bytes: in the dtypes in which it is stored, each part entropy-coded where that pays.

A record is a magic word, the length and the checksum of a header, the header (JSON) and the parts. What the parts are
depends on its form:
  plain    the values
  scaled   a block-scaled moment: codes and scales; the values are fp32
  beside   an fp32 master beside its bf16 weight, which the checkpoint has elsewhere: remainders, and the elements for
           which these do not suffice (`optim.state.at_rest`)
Parts that are coded have checksums of their blocks; of others whoever holds the record has one.
"""

import json
import zlib
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from torch_ext.native import planes
from torch_ext.optim.state import at_rest
from torch_ext.tensors import dense

MAGIC = b"TXREST1\n"
_HEAD = len(MAGIC) + 8
_LONGEST = 1 << 16  # bytes of a header
_LEAST = 1 << 10  # bytes of a part that is worth coding
_PARTS = {"plain": 1, "scaled": 2, "beside": 3}


class Place(NamedTuple):
    """The elements of a tensor of a checkpoint that a weight beside a master is."""

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


WeightAt: TypeAlias = Callable[[Place], Tensor]


class _Part(NamedTuple):
    dtype: torch.dtype
    numel: int
    nbytes: int
    coded: bool


class Record(NamedTuple):
    """A record whose header was read."""

    form: str
    dtype: torch.dtype
    """Of the values."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    place: Place | None
    """Of a form `beside`."""
    weight_crc: int
    format: int
    skip: int
    """Of a form `scaled`: how its elements were rounded, and how many of its codes are before the first one."""
    parts: tuple[_Part, ...]
    begin: int
    """Where the first part begins."""

    @property
    def nbytes(self) -> int:
        return self.begin + sum(part.nbytes for part in self.parts)

    @property
    def plain_bytes(self) -> int:
        """What the parts are before they are coded."""
        return sum(part.numel * part.dtype.itemsize for part in self.parts)

    @property
    def stored(self) -> str:
        """The dtype in which it is stored, for people."""
        return str(self.parts[0].dtype).removeprefix("torch.")


# -- writing ------------------------------------------------------------------------------------------------------


def pack(t: Tensor, compress: bool, weight: Tensor | None = None, place: Place | None = None) -> list[Any]:
    """The pieces, in order, of the record of a tensor: of a strided one, which may be one of our state tensors.

    weight, place: of an fp32 master, the bf16 weight beside it, of its shape, and where the checkpoint has that.
    """
    scaled = at_rest.scaled_of(t)
    if scaled is not None:
        shape, strides = tuple(t.shape), tuple(t.handle.run.strides())  # type: ignore[attr-defined]
        about = {"form": "scaled", "format": scaled.format, "skip": scaled.skip}
        return _pieces(about, torch.float32, shape, strides, scaled[:2], compress)
    values = _plain(t)
    if not dense.is_dense(values):
        values = values.contiguous()
    flat = _line(values)
    shape, strides = tuple(values.shape), values.stride()
    if weight is not None and place is not None and _may_be_beside(values, weight):
        of = _line(dense.in_order_of(values, weight))
        if (found := at_rest.beside(flat, of)) is not None:
            about = {"form": "beside", "key": place.key, "offsets": place.offsets, "crc": _crc(of)}
            return _pieces(about, torch.float32, shape, strides, found, compress)
    return _pieces({"form": "plain"}, values.dtype, shape, strides, [flat], compress)


def _plain(t: Tensor) -> Tensor:
    """On the host, without a subclass."""
    if hasattr(t, "decoded"):
        t = t.decoded()
    return t.detach().as_subclass(Tensor).cpu().resolve_conj().resolve_neg()


def _may_be_beside(values: Tensor, weight: Tensor) -> bool:
    return values.dtype == torch.float32 and weight.dtype == torch.bfloat16 and values.shape == weight.shape


def _crc(flat: Tensor) -> int:
    return zlib.crc32(_bytes(flat).numpy().data)


def _line(t: Tensor) -> Tensor:
    """A dense tensor's memory, of one dimension; torch's view keeps any stride where there is one element."""
    return t.detach().as_strided((t.numel(),), (1,), t.storage_offset())


def _bytes(flat: Tensor) -> Tensor:
    return flat.contiguous().view(torch.uint8)


def _pieces(
    about: dict[str, Any],
    dtype: torch.dtype,
    shape: Sequence[int],
    strides: Sequence[int],
    parts: Sequence[Tensor],
    compress: bool,
) -> list[Any]:
    described, data = [], []
    for part in parts:
        values = _line(part.detach().cpu().contiguous())
        coded = compress and values.dtype in planes.DTYPES and values.nbytes >= _LEAST
        found = planes.encode(values) if coded else _bytes(values)
        described.append([_name(values.dtype), values.numel(), found.numel(), int(coded)])
        data.append(found.numpy().data)
    header = about | {"dtype": _name(dtype), "shape": list(shape), "strides": list(strides), "parts": described}
    raw = json.dumps(header, separators=(",", ":")).encode()
    return [MAGIC + len(raw).to_bytes(4, "little") + zlib.crc32(raw).to_bytes(4, "little") + raw, *data]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# -- reading ------------------------------------------------------------------------------------------------------


def is_record(begin: bytes) -> bool:
    return begin[: len(MAGIC)] == MAGIC


def head_bytes(begin: bytes) -> int:
    """Of a record that begins so (_HEAD bytes or more), up to the first part. ValueError where it is none."""
    if len(begin) < _HEAD or not is_record(begin):
        raise ValueError("it is no tensor at rest, or truncated")
    length = int.from_bytes(begin[len(MAGIC) : len(MAGIC) + 4], "little")
    if length > _LONGEST:
        raise ValueError("its header is damaged")
    return _HEAD + length


def parse(raw: bytes) -> Record:
    """The header of a record, which `raw` begins with. ValueError where it is damaged or truncated."""
    begin = head_bytes(raw)
    header = raw[_HEAD:begin]
    if len(header) < begin - _HEAD or zlib.crc32(header).to_bytes(4, "little") != raw[_HEAD - 4 : _HEAD]:
        raise ValueError("its header is damaged or truncated")
    try:
        return _record(json.loads(header), begin)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"its header is none that torch_ext writes ({type(error).__name__}: {error})") from error


def _record(header: dict[str, Any], begin: int) -> Record:
    shape, strides = _sizes(header["shape"]), _sizes(header["strides"])
    parts = tuple(
        _Part(_dtype(name), _size(numel), _size(nbytes), bool(coded)) for name, numel, nbytes, coded in header["parts"]
    )
    form, place = header["form"], None
    if len(shape) != len(strides) or len(parts) != _PARTS[form]:
        raise ValueError(f"{len(parts)} parts")
    if form == "beside":
        place = Place(str(header["key"]), _sizes(header["offsets"]), shape)
        if len(place.offsets) != len(shape) or parts[1].numel != parts[2].numel:
            raise ValueError("offsets")
    numel, skip = prod(shape), _size(header.get("skip", 0))
    span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    enough = parts[0].numel >= skip + numel if form == "scaled" else parts[0].numel == numel
    if not enough or (numel and span != numel):
        raise ValueError("its shape is not that of its values")
    for part in parts:
        if not part.coded and part.nbytes != part.numel * part.dtype.itemsize:
            raise ValueError("its bytes are not those of its values")
    crc, formatted = int(header.get("crc", 0)), int(header.get("format", 0))
    return Record(form, _dtype(header["dtype"]), shape, strides, place, crc, formatted, skip, parts, begin)


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 56:
        raise ValueError(f"{value!r} is no size")
    return value


def _sizes(values: Any) -> tuple[int, ...]:
    return tuple(map(_size, values))


def _dtype(name: str) -> torch.dtype:
    found = vars(torch).get(name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name} is no dtype")
    return found


def unpack(found: Record, raw: Tensor, weight_at: WeightAt) -> Tensor:
    """The tensor. raw: uint8, the record. weight_at: the weight beside a master, of any memory order.

    ValueError where it is damaged, truncated, or beside another weight.
    """
    parts = _parts(found, raw)
    if found.form == "plain":
        flat = parts[0]
    elif found.form == "scaled":
        flat = _decoded_scaled(found, parts)
    else:
        flat = _beside(found, parts, weight_at)
    if flat.dtype != found.dtype:
        raise ValueError(f"it is {flat.dtype}, and its header says {found.dtype}")
    return flat.as_strided(found.shape, found.strides, flat.storage_offset())


def scaled(found: Record, raw: Tensor) -> at_rest.Scaled:
    """Of a form `scaled`, codes and scales. ValueError as `unpack`."""
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


def _values(part: _Part, raw: Tensor) -> Tensor:
    if not part.coded:
        return raw.clone().view(part.dtype)
    try:
        if (message := planes.read(raw))[:2] != (part.dtype, part.numel):
            raise ValueError(f"it has {message.numel} elements in {message.dtype}")
        values = torch.empty(part.numel, dtype=part.dtype)
        planes.decode(raw, 0, values)
    except RuntimeError as error:
        raise ValueError(str(error)) from error
    return values


def _decoded_scaled(found: Record, parts: Sequence[Tensor]) -> Tensor:
    try:
        scaled = at_rest.Scaled(parts[0], parts[1], found.format, found.skip)
        return _line(at_rest.decoded(scaled, prod(found.shape)))
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"its codes and scales are not of each other ({error})") from error


def _beside(found: Record, parts: Sequence[Tensor], weight_at: WeightAt) -> Tensor:
    assert found.place is not None
    weight = weight_at(found.place)
    if weight.dtype != torch.bfloat16 or tuple(weight.shape) != found.shape:
        raise ValueError(f"{found.place.key!r}, which it is stored beside, is {weight.dtype} {tuple(weight.shape)}")
    like = torch.empty_strided(found.shape, found.strides, dtype=weight.dtype)
    of = _line(dense.in_order_of(like, weight.cpu()))
    if _crc(of) != found.weight_crc:
        raise ValueError(f"{found.place.key!r}, which it is stored beside, is not what it was when this was saved")
    remainder = at_rest.Remainder(parts[0], parts[1], parts[2])
    if [part.dtype for part in parts] != [torch.int16, torch.int64, torch.int32]:
        raise ValueError("its parts are no remainders")
    if parts[1].numel() and not 0 <= int(parts[1].min()) <= int(parts[1].max()) < of.numel():
        raise ValueError("its parts are of another tensor")
    return at_rest.master_of(of, remainder)


def check(found: Record, raw: Tensor) -> None:
    """Compares the checksums of the parts that have some. ValueError where one is another one."""
    at = found.begin
    for part in found.parts:
        if part.coded:
            try:
                planes.check(raw[at : at + part.nbytes])
            except RuntimeError as error:
                raise ValueError(str(error)) from error
        at += part.nbytes
