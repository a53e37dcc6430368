"""The header of a record. A record is one tensor encoded as bytes, in the form in which it is stored ("at_rest").

A record is a magic word, the header's length and checksum, the header (JSON) and the parts. The parts depend on the
record's form:
  plain    one part: the values
  scaled   a block-scaled moment: codes and scales; decoded values are fp32
  beside   an fp32 master whose bf16 weight is elsewhere in the same checkpoint: the remainders; and indices and bits of
           the elements that weight and remainder do not determine (`optim.state.at_rest`)
Entropy-coded parts have a checksum for each of their blocks. Other parts are covered by a checksum that the file around
the record has.
"""

import json
import zlib
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch

MAGIC = b"TXREST1\n"
_HEAD = len(MAGIC) + 8
_LONGEST = 1 << 16  # bytes of a header
_PARTS = {"plain": 1, "scaled": 2, "beside": 3}


class Place(NamedTuple):
    """The region of a tensor of the checkpoint that holds the bf16 weight of a master."""

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Part(NamedTuple):
    """One part of a record. nbytes: size in the record. coded: whether it is entropy-coded."""

    dtype: torch.dtype
    numel: int
    nbytes: int
    coded: bool


class Record(NamedTuple):
    """The parsed header of a record."""

    form: str
    dtype: torch.dtype
    """dtype of the decoded values."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    place: Place | None
    """Form "beside": where the weight is; else None."""
    weight_crc: int
    """Form "beside": CRC-32 of that weight, in the record's memory order; else 0."""
    format: int
    """Form "scaled": the codes' format, constants.FORMAT_*; else 0."""
    skip: int
    """Form "scaled": number of codes before the tensor's first element; else 0."""
    parts: tuple[Part, ...]
    begin: int
    """Offset of the first part in the record."""

    @property
    def nbytes(self) -> int:
        return self.begin + sum(part.nbytes for part in self.parts)

    @property
    def plain_bytes(self) -> int:
        """Size of the parts before entropy-coding."""
        return sum(part.numel * part.dtype.itemsize for part in self.parts)

    @property
    def stored(self) -> str:
        """The name of the dtype in which the tensor is stored, for listings."""
        return str(self.parts[0].dtype).removeprefix("torch.")


def head_of(
    header_fields: dict[str, Any],
    dtype: torch.dtype,
    shape: Sequence[int],
    strides: Sequence[int],
    parts: Sequence[Part],
) -> bytes:
    """Returns the beginning of a record, up to the first part. header_fields: "form", and the fields that only this
    form has. dtype: of the decoded values."""
    described = [[_name(part.dtype), part.numel, part.nbytes, int(part.coded)] for part in parts]
    header = header_fields | {"dtype": _name(dtype), "shape": list(shape), "strides": list(strides), "parts": described}
    raw = json.dumps(header, separators=(",", ":")).encode()
    return MAGIC + len(raw).to_bytes(4, "little") + zlib.crc32(raw).to_bytes(4, "little") + raw


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def is_record(begin: bytes) -> bool:
    return begin[: len(MAGIC)] == MAGIC


def head_bytes(begin: bytes) -> int:
    """Returns the offset of a record's first part. begin: the record's first _HEAD bytes or more. Raises ValueError if
    it is no record."""
    if len(begin) < _HEAD or not is_record(begin):
        raise ValueError("it is not a tensor that torch_ext stored at rest, or it is truncated")
    length = int.from_bytes(begin[len(MAGIC) : len(MAGIC) + 4], "little")
    if length > _LONGEST:
        raise ValueError("its header is damaged")
    return _HEAD + length


def parse(raw: bytes) -> Record:
    """Parses the header of the record that `raw` begins with. Raises ValueError if it is damaged or truncated."""
    begin = head_bytes(raw)
    header = raw[_HEAD:begin]
    if len(header) < begin - _HEAD or zlib.crc32(header).to_bytes(4, "little") != raw[_HEAD - 4 : _HEAD]:
        raise ValueError("its header is damaged or truncated")
    try:
        return _record(json.loads(header), begin)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"its header is not one that torch_ext writes ({type(error).__name__}: {error})") from error


def _record(header: dict[str, Any], begin: int) -> Record:
    shape, strides = _sizes(header["shape"]), _sizes(header["strides"])
    parts = tuple(
        Part(_dtype(name), _size(numel), _size(nbytes), bool(coded)) for name, numel, nbytes, coded in header["parts"]
    )
    form, place = header["form"], None
    if len(shape) != len(strides) or len(parts) != _PARTS[form]:
        raise ValueError(f"form {form!r} with {len(parts)} parts, {len(shape)} sizes and {len(strides)} strides")
    if form == "beside":
        place = Place(str(header["key"]), _sizes(header["offsets"]), shape)
        if len(place.offsets) != len(shape) or parts[1].numel != parts[2].numel:
            raise ValueError(
                "its weight's offsets do not fit its shape, or its remainder's indices and values differ in number"
            )
    numel, skip = prod(shape), _size(header.get("skip", 0))
    span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    enough = parts[0].numel >= skip + numel if form == "scaled" else parts[0].numel == numel
    if not enough or (numel and span != numel):
        raise ValueError("its shape and strides do not fit its number of values")
    for part in parts:
        if not part.coded and part.nbytes != part.numel * part.dtype.itemsize:
            raise ValueError("its number of bytes does not fit its number of values")
    crc, formatted = int(header.get("crc", 0)), int(header.get("format", 0))
    return Record(form, _dtype(header["dtype"]), shape, strides, place, crc, formatted, skip, parts, begin)


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 56:
        raise ValueError(f"{value!r} is not a size")
    return value


def _sizes(values: Any) -> tuple[int, ...]:
    return tuple(map(_size, values))


def _dtype(name: str) -> torch.dtype:
    found = vars(torch).get(name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name} is not a dtype of torch")
    return found
