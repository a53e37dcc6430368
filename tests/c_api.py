"""Calls functions of the C library, as csrc/torch_ext.h declares them. Of the Python package it uses only
`torch_ext.library_path()`."""

import ctypes
from collections.abc import Callable
from typing import Any

import torch  # noqa: F401  the library looks torch up in the process

import torch_ext


def function(name: str, *argtypes: Any, restype: Any) -> Callable[..., Any]:
    """Returns the C function `name`. restype None: it returns nothing."""
    symbol = ctypes.CDLL(torch_ext.library_path())[name]
    symbol.argtypes, symbol.restype = argtypes, restype
    return symbol


def operators() -> dict[str, str]:
    """Returns name ("adamw_") -> schema ("adamw_(Tensor(a!)[] params, ...) -> ()"), in the order of the library."""
    name_of = function("tx_operator_name", ctypes.c_int32, restype=ctypes.c_char_p)
    schema_of = function("tx_operator_schema", ctypes.c_int32, restype=ctypes.c_char_p)
    table: dict[str, str] = {}
    while name := name_of(len(table)):
        table[name.decode()] = schema_of(len(table)).decode()
    return table


def version() -> str:
    """Returns the library's version, "0.1.0"."""
    number = function("tx_version", restype=ctypes.c_uint32)()
    return f"{number >> 16}.{number >> 8 & 0xFF}.{number & 0xFF}"
