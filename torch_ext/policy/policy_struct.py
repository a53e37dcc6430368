"""tx_policy as a ctypes struct, made from what the library says of its fields."""

import ctypes
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from torch_ext.native import constants, dtypes, library

if TYPE_CHECKING:
    pass


# -- mirrors of the C structs -------------------------------------------------------------------------------------


class _Field(library.Struct):
    c_name = "tx_policy_field"
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("legal", ctypes.c_char_p),
        ("offset", ctypes.c_int64),
        ("bytes", ctypes.c_int64),
        ("type", ctypes.c_int32),
        ("side", ctypes.c_int32),
    ]


class _Setting(library.Struct):
    c_name = "tx_setting"
    _fields_ = [
        ("key", ctypes.c_char_p),
        ("text", ctypes.c_char_p),
        ("number", ctypes.c_double),
        ("integer", ctypes.c_int64),
        ("kind", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    ]


_HOOK = ctypes.CFUNCTYPE(
    ctypes.c_int32,
    ctypes.c_void_p,
    ctypes.c_void_p,  # const tx_policy *
    ctypes.POINTER(ctypes.POINTER(_Setting)),
    ctypes.POINTER(ctypes.c_int64),
    ctypes.POINTER(library.Error),
)


class _Overrides(library.Struct):
    c_name = "tx_policy_overrides"
    _fields_ = [
        ("n", ctypes.c_int64),
        ("settings", ctypes.POINTER(_Setting)),
        ("hook", _HOOK),
        ("hook_ctx", ctypes.c_void_p),
    ]


class _Arguments(library.Struct):
    c_name = "tx_policy_args"
    _fields_ = [
        ("size", ctypes.c_uint64),
        ("n_config", ctypes.c_int64),
        ("config", ctypes.POINTER(_Setting)),
        ("optimizer", _Overrides),
        ("ddp", _Overrides),
        ("model_dtype", ctypes.c_int32),
        ("bf16", ctypes.c_int32),
        ("fp16", ctypes.c_int32),
        ("preset", ctypes.c_int32),
        ("full_shard", ctypes.c_int32),
        ("shard_dtype", ctypes.c_int32),
    ]


class _Origin(library.Struct):
    c_name = "tx_origin"
    _fields_ = [("source", ctypes.c_int32), ("cause", ctypes.c_int32)]


class _Row(NamedTuple):
    """A field of tx_policy: how it is stored and read."""

    name: str
    choices: tuple[str, ...]  # of an enum, by value
    offset: int
    type: int
    side: int


_C_TYPES: dict[int, Any] = {constants.FIELD_F64: ctypes.c_double, constants.FIELD_I64: ctypes.c_int64}


@functools.cache
def rows() -> tuple[_Row, ...]:
    """The library's table of policy fields, in its order."""
    field_at = library.function("tx_policy_field_at", ctypes.c_int32, restype=ctypes.POINTER(_Field))
    table: list[_Row] = []
    while field := field_at(len(table)):
        f = field.contents
        choices = tuple(part.strip() for part in f.legal.decode().split(","))
        table.append(_Row(f.name.decode(), choices, f.offset, f.type, f.side))
    return tuple(table)


@functools.cache
def policy_struct() -> type[library.Struct]:
    """The mirror of tx_policy."""
    field_at = library.function("tx_policy_field_at", ctypes.c_int32, restype=ctypes.POINTER(_Field))
    fields: list[tuple[str, Any]] = [("size", ctypes.c_uint64)]
    for i, row in enumerate(rows()):
        c_type = _C_TYPES.get(row.type, ctypes.c_int32)
        fields.append(
            (row.name, ctypes.c_char * field_at(i).contents.bytes if row.type == constants.FIELD_TEXT else c_type)
        )
    fields.append(("reserved", ctypes.c_int32))
    mirror = type("_PolicyStruct", (library.Struct,), {"c_name": "tx_policy", "_fields_": fields})
    for row in rows():
        assert getattr(mirror, row.name).offset == row.offset, f"tx_policy.{row.name} is not where the library has it"
    return mirror


def _decode(struct: ctypes.Structure) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for row in rows():
        value = getattr(struct, row.name)
        if row.type == constants.FIELD_F64:
            value = None if value != value else value
        elif row.type == constants.FIELD_I64:
            value = None if value == constants.NO_INT else value
        elif row.type == constants.FIELD_DTYPE:
            value = dtypes.dtype_of(value)
        elif row.type == constants.FIELD_BOOL:
            value = bool(value)
        elif row.type == constants.FIELD_ENUM:
            value = row.choices[value]
        else:
            value = value.decode("utf-8", "replace")
        values[row.name] = value
    return values


def _encode(values: Mapping[str, Any]) -> ctypes.Structure:
    struct = policy_struct()(size=ctypes.sizeof(policy_struct()))
    for row in rows():
        value = values[row.name]
        if row.type == constants.FIELD_F64:
            value = float("nan") if value is None else value
        elif row.type == constants.FIELD_I64:
            value = constants.NO_INT if value is None else value
        elif row.type == constants.FIELD_DTYPE:
            value = 0 if value is None else dtypes.code_of(value)
        elif row.type == constants.FIELD_ENUM:
            value = row.choices.index(value)
        elif row.type == constants.FIELD_TEXT:
            value = value.encode()
        setattr(struct, row.name, value)
    return struct
