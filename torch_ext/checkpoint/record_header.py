"""The header of a record, which is one tensor at rest as bytes: what its parts are and where they are.

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
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch

MAGIC = b"TXREST1\n"
_HEAD = len(MAGIC) + 8
_LONGEST = 1 << 16  # bytes of a header
_PARTS = {"plain": 1, "scaled": 2, "beside": 3}


class Place(NamedTuple):
    """The elements of a tensor of a checkpoint that a weight beside a master is."""

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Part(NamedTuple):
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
    parts: tuple[Part, ...]
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


def head_of(
    about: dict[str, Any], dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int], parts: Sequence[Part]
) -> bytes:
    """What a record begins with. about: "form", and what is said of that form alone; dtype: of the values."""
    described = [[_name(part.dtype), part.numel, part.nbytes, int(part.coded)] for part in parts]
    header = about | {"dtype": _name(dtype), "shape": list(shape), "strides": list(strides), "parts": described}
    raw = json.dumps(header, separators=(",", ":")).encode()
    return MAGIC + len(raw).to_bytes(4, "little") + zlib.crc32(raw).to_bytes(4, "little") + raw


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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
        Part(_dtype(name), _size(numel), _size(nbytes), bool(coded)) for name, numel, nbytes, coded in header["parts"]
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
