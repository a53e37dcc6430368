"""Translates between torch dtypes, the C library's codes and the dtype names of configurations. The table is C's
(csrc/core/dtypes.def)."""

import ctypes
import functools
from collections.abc import Mapping
from typing import Any

import torch

from torch_ext.native import library


@functools.cache
def _codes() -> dict[int, torch.dtype]:
    """Returns tx_dtype code -> torch dtype, for the dtypes that this torch has."""
    torch_name = library.function("tx_dtype_torch_name", ctypes.c_int32, restype=ctypes.c_char_p)
    codes: dict[int, torch.dtype] = {}
    code = 1
    while name := torch_name(code):
        dtype = getattr(torch, name.decode(), None)
        if isinstance(dtype, torch.dtype):
            codes[code] = dtype
        code += 1
    return codes


@functools.cache
def _codes_of_dtypes() -> dict[torch.dtype, int]:
    return {dtype: code for code, dtype in _codes().items()}


def code_of(dtype: torch.dtype) -> int | None:
    """Returns the library's code (tx_dtype) of a torch dtype; None for a dtype that the library does not know."""
    return _codes_of_dtypes().get(dtype)


def dtype_of(code: int) -> torch.dtype | None:
    """Returns the torch dtype of a code; None for TX_NONE."""
    return _codes()[code] if code else None


def name_of(dtype: torch.dtype | None) -> str | None:
    """Returns the name that configurations use: "bf16" for torch.bfloat16; None for None."""
    if dtype is None:
        return None
    name = library.function("tx_dtype_name", ctypes.c_int32, restype=ctypes.c_char_p)
    return str(name(_codes_of_dtypes()[dtype]).decode())


def c_text(text: str) -> bytes:
    """Returns UTF-8 for a `const char *`. A NUL is escaped: C would not see the text after it."""
    return text.replace("\0", "\\0").encode("utf-8", "replace")


def coerce_dtypes(mapping: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns a copy of a configuration in which dtype names are replaced by torch dtypes.

    Only keys that end in "_dtype" are touched. Names are stripped and compared without case: fp32|float32|float,
    bf16|bfloat16, fp16|float16|half, fp8|float8|uint8 (torch.uint8, how 8-bit state is stored); "auto" becomes None. A
    torch.dtype is checked like a name. None and values of other types stay. None instead of a mapping gives {}.

    Raises ValueError, naming the key, the value and what is legal, for an unknown name and for a dtype that the key
    does not take (main_params_dtype, exp_avg_dtype and exp_avg_sq_dtype have legal sets).
    """
    return {key: _coerce(key, value) for key, value in (mapping or {}).items()}


def _coerce(key: Any, value: Any) -> Any:
    if not isinstance(key, str) or not key.endswith("_dtype"):
        return value
    code = code_of(value) if isinstance(value, torch.dtype) else None
    if code is not None:
        library.function("tx_dtype_check_key", ctypes.c_char_p, ctypes.c_int32)(c_text(key), code)
        return value
    if isinstance(value, str | torch.dtype):
        parsed, text = ctypes.c_int32(), ctypes.c_char_p
        coerce = library.function("tx_dtype_coerce", text, text, ctypes.POINTER(ctypes.c_int32))
        coerce(c_text(key), c_text(str(value)), ctypes.byref(parsed))
        return dtype_of(parsed.value)
    return value
