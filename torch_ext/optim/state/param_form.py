"""What a state was made for: the dtype, shape and placements that its parameter had then.

A converted model has parameters of another shape, whose elements are others even where there are as many, or of another
dtype, with or without a master. The state itself does not show either.
"""

import ctypes
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_ext.native import dtypes, library
from torch_ext.optim.state.state_dtypes import first_moment
from torch_ext.params import local_shard

MEANING = (
    "A model that was converted after its optimizer took steps needs a new optimizer, load_state_dict() with a "
    "state that fits it, or to be converted back"
)


class Form(NamedTuple):
    """Of a parameter, when its state was made or loaded."""

    dtype: torch.dtype
    shape: torch.Size
    placements: Any  # of a DTensor
    exp_avg: "weakref.ref[Tensor] | None"
    """Identifies the state that was made for it; None in a pickle. A state that a user replaced is not checked."""

    def __str__(self) -> str:
        placed = f", placed {self.placements}" if self.placements else ""
        return f"{tuple(self.shape)} in {self.dtype}{placed}"

    def fits(self, p: Tensor) -> bool:
        """Whether p still has it."""
        return self.dtype == p.dtype and self.shape == p.shape and self.placements == _placements(p)

    def is_of(self, state: Mapping[str, Any]) -> bool:
        moment = first_moment(state)
        return moment is not None and self.exp_avg is not None and self.exp_avg() is moment


def form_of(p: Tensor, exp_avg: Tensor | None = None) -> Form:
    return Form(p.dtype, p.shape, _placements(p), None if exp_avg is None else weakref.ref(exp_avg))


def _placements(p: Any) -> Any:
    return tuple(p.placements) if local_shard.is_dtensor(p) else ()


def refuse_converted(converted: Iterable[tuple[str, Tensor, Form]]) -> None:
    """ValueError, naming the first and counting the others, where there is one."""
    found = list(converted)
    if found:
        name, p, form = found[0]
        others = f" (and so of {len(found) - 1} other parameters)" if found[1:] else ""
        raise ValueError(
            f"{name} was {form} when its optimizer state was made, and is {form_of(p)} now{others}. {MEANING}"
        )


def signature(tensors: Sequence[Tensor]) -> int:
    """What adamw_flat_ compares the dtypes and shapes of its parameters with."""
    words: list[int] = []
    for t in tensors:
        words += (dtypes.code_of(t.dtype) or 0, *((t.dim(), *t.shape) if t.numel() else (-1,)))
    return _signature_of(words)


def address_signature(tensors: Sequence[Tensor]) -> int:
    """What it compares their addresses with."""
    return _signature_of([t.data_ptr() if t.numel() else 0 for t in tensors])


def _signature_of(words: list[int]) -> int:
    int64 = ctypes.c_int64
    of_words = library.function("tx_signature", int64, ctypes.POINTER(int64), restype=int64, brief=True)
    return int(of_words(len(words), (int64 * len(words))(*words)))
