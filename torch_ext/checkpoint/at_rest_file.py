"""Converts an object to what torch_ext.save(..., states="at_rest") writes to its file, and back.

torch.save writes a dict. "torch_ext.at_rest" is the version of the format. "names" and "records" hold each tensor's
path in the object and its record (`record`). "object" is the object with each tensor replaced by
{"torch_ext.tensor": index}. So torch.load can read the file, the archive has checksums, and it holds plain values only.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_ext.checkpoint import record, record_header
from torch_ext.optim.state import at_rest
from torch_ext.optim.state.chunked_tensor import DecodingTensor
from torch_ext.optim.state.large_tensor import LargeTensor
from torch_ext.tensors import dense

KEY = "torch_ext.at_rest"
_TENSOR = "torch_ext.tensor"
_VERSION = 1
_LEAST = 64  # elements of the smallest tensor that gets a record; torch.save writes smaller ones
_HEAD = 32  # number of first elements that are compared to find a master's weight


class _Found(NamedTuple):
    name: str
    tensor: Tensor


def pack(obj: Any, compress: bool) -> dict[str, Any]:
    """Returns the dict to be written by torch.save."""
    found: list[_Found] = []
    places: dict[Any, dict[str, int]] = {}

    def placed(name: str, value: Any) -> Any:
        if isinstance(value, dict):
            raise ValueError(f"{name or 'the object'} has a key {_TENSOR!r} or {KEY!r}, which are torch_ext's own")
        if not isinstance(value, Tensor) or not _packs(value):
            return value
        key = _identity(value)
        if key not in places:
            places[key] = {_TENSOR: len(found)}
            found.append(_Found(name, value))
        return places[key]

    obj = _mapped(obj, placed)
    weights = _weights(found)
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        records = list(pool.map(lambda each: _record(each.tensor, compress, found, weights), found))
    return {KEY: _VERSION, "names": [each.name for each in found], "records": records, "object": obj}


def _packs(t: Tensor) -> bool:
    """Whether a tensor gets a record; torch.save writes other tensors."""
    ours = type(t) in (Tensor, torch.nn.Parameter) or isinstance(t, DecodingTensor | LargeTensor | dense.SharingTensor)
    return ours and t.layout is torch.strided and not t.is_quantized and t.numel() >= _LEAST and not t.is_meta


def _identity(t: Tensor) -> Any:
    """Returns a key that is equal for tensors with the same content in the same memory: these share one record."""
    if isinstance(t, DecodingTensor):
        return id(t)  # `found` in pack keeps the tensor alive, so that its id stays unique
    return t.data_ptr(), t.dtype, t.shape, t.stride(), t.device


def _mapped(obj: Any, of: Callable[[str, Any], Any], name: str = "") -> Any:
    """Returns a copy of plain containers, nested to any depth, with each value replaced by `of(name, value)`. A dict
    that has one of our own keys is passed to `of` as a value."""
    if isinstance(obj, dict):
        if _TENSOR in obj or KEY in obj:
            return of(name, obj)
        if type(obj) not in (dict, OrderedDict):
            return obj
        made = copy.copy(obj)  # keeps the attributes that a module's state dict has
        for key, value in obj.items():
            made[key] = _mapped(value, of, f"{name}.{key}" if name else str(key))
        return made
    if type(obj) in (list, tuple):
        return type(obj)(_mapped(value, of, f"{name}.{i}" if name else str(i)) for i, value in enumerate(obj))
    return of(name, obj)


def _weights(found: list[_Found]) -> dict[Any, list[int]]:
    """Returns the indices of the tensors that may be the weight of a master, by `_lookup_key`."""
    weights: dict[Any, list[int]] = {}
    for index, (_, t) in enumerate(found):
        if t.dtype == torch.bfloat16 and not isinstance(t, DecodingTensor) and dense.is_dense(t):
            weights.setdefault(_lookup_key(t), []).append(index)
    return weights


def _lookup_key(t: Tensor) -> Any:
    """Returns shape, strides and first elements, rounded to bf16: equal for a master and its weight."""
    head = t.detach().as_subclass(Tensor).as_strided((_HEAD,), (1,), t.storage_offset()).to(torch.bfloat16)
    return tuple(t.shape), t.stride(), tuple(head.view(torch.int16).tolist())


def _record(t: Tensor, compress: bool, found: list[_Found], weights: dict[Any, list[int]]) -> Tensor:
    if isinstance(t, DecodingTensor) and at_rest.scaled_of(t) is None:
        t = t.decoded()
    if not isinstance(t, DecodingTensor):
        t = t.detach().as_subclass(Tensor)
    index = _weight_of(t, found, weights)
    weight = None if index is None else found[index].tensor.detach().cpu()
    place = None if index is None else record_header.Place(str(index), (0,) * t.ndim, tuple(t.shape))
    pieces = record.pack(t, compress, weight, place)
    return torch.cat([torch.frombuffer(bytearray(piece), dtype=torch.uint8) for piece in pieces if len(piece)])


def _weight_of(t: Tensor, found: list[_Found], weights: dict[Any, list[int]]) -> int | None:
    """Returns the index of the bf16 tensor that t rounds to; None if t is no fp32 master or there is no such tensor."""
    if t.dtype != torch.float32 or isinstance(t, DecodingTensor) or not dense.is_dense(t):
        return None
    candidates = weights.get(_lookup_key(t), ())
    rounded = dense.flat(t).view(-1).to(torch.bfloat16).view(torch.int16) if candidates else t
    for index in candidates:
        weight = dense.flat(found[index].tensor.detach()).view(-1)
        if torch.equal(weight.view(torch.int16), rounded):
            return index
    return None


# -- reading ------------------------------------------------------------------------------------------------------


def is_packed(obj: Any) -> bool:
    return isinstance(obj, dict) and KEY in obj


def unpack(packed: dict[str, Any]) -> Any:
    """Returns the object that `pack` was given. Raises ValueError, with the name of a tensor, if it is damaged. Each
    tensor is on the device of its record."""
    if packed[KEY] != _VERSION:
        raise ValueError(f"it has version {packed[KEY]!r} of states at rest; this torch_ext reads {_VERSION}")
    names, records = packed["names"], packed["records"]
    if not isinstance(records, list) or len(names) != len(records):
        raise ValueError("its tensors and their names differ in number")
    made: dict[int, Tensor] = {}

    def tensor(index: int) -> Tensor:
        if index not in made:
            made[index] = _unpacked(records[index], names[index], weight_at)
        return made[index]

    def weight_at(place: record_header.Place) -> Tensor:
        if not place.key.isdecimal() or int(place.key) >= len(records):
            raise ValueError(f"it is stored relative to the weight with number {place.key!r}, which is not in the file")
        if record_header.parse(head_of(records[int(place.key)].cpu())).place is not None:
            raise ValueError(f"it is stored relative to {names[int(place.key)]!r}, which is not a weight")
        return tensor(int(place.key)).cpu()

    return _filled(packed["object"], tensor)


def _unpacked(raw: Tensor, name: str, weight_at: record.WeightAt) -> Tensor:
    try:
        on_host = raw.cpu()
        return record.unpack(record_header.parse(head_of(on_host)), on_host, weight_at).to(raw.device)
    except ValueError as error:
        raise ValueError(f"{name!r}: {error}") from error


def head_of(raw: Tensor) -> bytes:
    """Returns the beginning of a record, as `record_header.parse` takes it."""
    begin = raw[:64].numpy().tobytes()
    return raw[: record_header.head_bytes(begin)].numpy().tobytes()


def _filled(obj: Any, tensor: Callable[[int], Tensor]) -> Any:
    """Replaces each {"torch_ext.tensor": index} by its tensor. Changes dicts in place; copies lists and tuples."""
    if isinstance(obj, dict):
        if _TENSOR in obj:
            return tensor(obj[_TENSOR])
        for key, value in obj.items():
            obj[key] = _filled(value, tensor)
        return obj
    if type(obj) in (list, tuple):
        return type(obj)(_filled(value, tensor) for value in obj)
    return obj


def described(packed: dict[str, Any]) -> Iterator[tuple[str, record_header.Record]]:
    """Yields each tensor's name and the header of its record."""
    for name, raw in zip(packed["names"], packed["records"], strict=True):
        yield name, record_header.parse(head_of(raw))


def names_of(obj: Any) -> list[str]:
    """Returns the names of the tensors in what torch.load returned, in the order of torch.save's storage numbers."""
    if is_packed(obj):
        return [*obj["names"], *names_of(obj["object"])]
    names: dict[int, str] = {}
    for name, t in tensors_of(obj):
        names.setdefault(t.untyped_storage().data_ptr(), name)
    return list(names.values())


def tensors_of(obj: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors in plain containers, nested to any depth, with their paths."""
    if isinstance(obj, Tensor):
        yield name, obj
    elif isinstance(obj, dict | list | tuple):
        for key, value in obj.items() if isinstance(obj, dict) else enumerate(obj):
            yield from tensors_of(value, f"{name}.{key}" if name else str(key))
