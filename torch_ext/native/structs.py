"""Builds ctypes mirrors of the C library's structs from the library's own description of them (tx_struct_at)."""

import ctypes
import functools
from collections.abc import Callable
from typing import Any, TypeVar

from torch_ext.native import library


class _Field(library.Struct):
    c_name = "tx_struct_field"
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("type", ctypes.c_char_p),
        ("offset", ctypes.c_int64),
        ("bytes", ctypes.c_int64),
    ]


class _Struct(library.Struct):
    c_name = "tx_struct"
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("bytes", ctypes.c_int64),
        ("n_fields", ctypes.c_int64),
        ("fields", ctypes.POINTER(_Field)),
    ]


_Mirror = TypeVar("_Mirror", bound=library.Struct)

_TYPES: dict[str, Any] = {
    "int32": ctypes.c_int32,
    "int64": ctypes.c_int64,
    "uint64": ctypes.c_uint64,
    "double": ctypes.c_double,
    "char *": ctypes.c_char_p,
    "int64 *": ctypes.POINTER(ctypes.c_int64),
}
"""tx_struct_field's type -> ctypes type. A pointer that is neither here nor to a mirrored struct is an address."""

_ELEMENTS: dict[str, Any] = {"char[]": ctypes.c_char, "uint64[]": ctypes.c_uint64}
"""The same for the elements of arrays."""

_MIRRORS: dict[str, type[library.Struct]] = {}


@functools.cache
def _described() -> dict[str, _Struct]:
    struct_at = library.function("tx_struct_at", ctypes.c_int32, restype=ctypes.POINTER(_Struct), keep_gil=True)
    found: dict[str, _Struct] = {}
    while struct := struct_at(len(found)):
        found[struct.contents.name.decode()] = struct.contents
    return found


def mirror(c_name: str, *, addresses: bool = False, **functions: Any) -> Callable[[type[_Mirror]], type[_Mirror]]:
    """A class decorator that gives a subclass of library.Struct the fields of the C struct `c_name`.

    A pointer to a struct that already has a mirror gets a ctypes pointer type, which keeps its target alive. Any other
    pointer is a plain address; with addresses=True all are. functions: the types of fields that point to functions.
    Raises ImportError if the library has no such struct, or ctypes lays it out differently.
    """

    def fill(kind: type[_Mirror]) -> type[_Mirror]:
        struct = _described().get(c_name)
        if struct is None:
            raise library.other_build(c_name)
        fields = struct.fields[: struct.n_fields]
        kind.c_name = c_name
        kind._fields_ = [(f.name.decode(), functions.get(f.name.decode()) or _type_of(f, addresses)) for f in fields]
        offsets = [getattr(kind, f.name.decode()).offset for f in fields]
        if (ctypes.sizeof(kind), offsets) != (struct.bytes, [f.offset for f in fields]):
            raise library.other_build(f"{c_name} in ctypes' layout")
        _MIRRORS[c_name] = kind
        return kind

    return fill


def _type_of(field: _Field, addresses: bool) -> Any:
    name = field.type.decode()
    if name.endswith("[]"):
        element = _ELEMENTS[name]
        return element * (field.bytes // ctypes.sizeof(element))
    if addresses and name.endswith("*"):
        return ctypes.c_void_p
    if (pointee := _MIRRORS.get(name.removesuffix(" *"))) is not None:
        return ctypes.POINTER(pointee) if name.endswith("*") else pointee
    return _TYPES.get(name, ctypes.c_void_p)
