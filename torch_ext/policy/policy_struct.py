"""tx_policy and related structs in ctypes, built from the library's table of fields."""

import ctypes
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch_ext.native import constants, dtypes, library, structs

# -- mirrors of the C structs -------------------------------------------------------------------------------------


@structs.mirror("tx_policy_field")
class _Field(library.Struct):
    """tx_policy_field: a row of the table of policy fields."""


@structs.mirror("tx_setting")
class _Setting(library.Struct):
    """tx_setting: a key and its value."""


_HOOK = ctypes.CFUNCTYPE(
    ctypes.c_int32,
    ctypes.c_void_p,
    ctypes.c_void_p,  # const tx_policy *
    ctypes.POINTER(ctypes.POINTER(_Setting)),
    ctypes.POINTER(ctypes.c_int64),
    ctypes.POINTER(library.Error),
)


@structs.mirror("tx_policy_overrides", hook=_HOOK)
class _Overrides(library.Struct):
    """tx_policy_overrides: the user's settings, or hook, for one side (optimizer or data parallelism)."""


@structs.mirror("tx_policy_args")
class _Arguments(library.Struct):
    """tx_policy_args: everything from which a policy is derived."""


@structs.mirror("tx_origin")
class _Origin(library.Struct):
    """tx_origin: where a value of the policy came from."""


class _Row(NamedTuple):
    """A field of tx_policy: how it is stored and read."""

    name: str
    choices: tuple[str | None, ...]  # names of an enum's values; the value is the index
    type: int
    side: int


@functools.cache
def rows() -> tuple[_Row, ...]:
    """Returns the library's table of policy fields, in its order."""
    field_at = library.function("tx_policy_field_at", ctypes.c_int32, restype=ctypes.POINTER(_Field))
    table: list[_Row] = []
    while field := field_at(len(table)):
        f = field.contents
        words = [part.strip() for part in f.legal.decode().split(",")]
        choices = tuple(None if word == "none" else word for word in words)
        table.append(_Row(f.name.decode(), choices, f.type, f.side))
    return tuple(table)


@structs.mirror("tx_policy")
class PolicyStruct(library.Struct):
    """tx_policy: one field per key."""


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
        elif row.type == constants.FIELD_TEXT:
            value = value.decode("utf-8", "replace")
        values[row.name] = value
    return values


def _encode(values: Mapping[str, Any]) -> ctypes.Structure:
    struct = PolicyStruct(size=ctypes.sizeof(PolicyStruct))
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
