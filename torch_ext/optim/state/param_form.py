"""Records the form for which a state was made: the dtype, shape and placements that its parameter had then.

A converted model may have parameters of another shape (other elements, even if their number is the same) or of another
dtype, which may or may not have a master. The state itself shows neither, so the form is recorded.
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
    """The form of a parameter when its state was made or loaded."""

    dtype: torch.dtype
    shape: torch.Size
    placements: Any  # of a DTensor
    exp_avg: "weakref.ref[Tensor] | None"
    """The first moment, which identifies the state; None in a pickle. A state that a user has replaced is not
    checked."""

    def __str__(self) -> str:
        placed = f", placed {self.placements}" if self.placements else ""
        return f"{tuple(self.shape)} in {self.dtype}{placed}"

    def fits(self, p: Tensor) -> bool:
        """Whether p still has this form."""
        return self.dtype == p.dtype and self.shape == p.shape and self.placements == _placements(p)

    def is_of(self, state: Mapping[str, Any]) -> bool:
        """Whether this is the form for which `state` was made."""
        moment = first_moment(state)
        return moment is not None and self.exp_avg is not None and self.exp_avg() is moment


def form_of(p: Tensor, exp_avg: Tensor | None = None) -> Form:
    return Form(p.dtype, p.shape, _placements(p), None if exp_avg is None else weakref.ref(exp_avg))


def _placements(p: Any) -> Any:
    return tuple(p.placements) if local_shard.is_dtensor(p) else ()


def refuse_converted(converted: Iterable[tuple[str, Tensor, Form]]) -> None:
    """Raises ValueError if there are converted parameters: names the first one and counts the others."""
    found = list(converted)
    if found:
        name, p, form = found[0]
        others = f" (and so of {len(found) - 1} other parameters)" if found[1:] else ""
        raise ValueError(
            f"{name} was {form} when its optimizer state was made, and is {form_of(p)} now{others}. {MEANING}"
        )


def signature(tensors: Sequence[Tensor]) -> int:
    """Returns a hash of the tensors' dtypes and shapes, with which adamw_flat_ compares its parameters."""
    words: list[int] = []
    for t in tensors:
        words += (dtypes.code_of(t.dtype) or 0, *((t.dim(), *t.shape) if t.numel() else (-1,)))
    return _signature_of(words)


def address_signature(tensors: Sequence[Tensor]) -> int:
    """Returns a hash of the tensors' addresses, with which adamw_flat_ compares its parameters."""
    return _signature_of([t.data_ptr() if t.numel() else 0 for t in tensors])


def _signature_of(words: list[int]) -> int:
    int64 = ctypes.c_int64
    hash_words = library.function("tx_signature", int64, ctypes.POINTER(int64), restype=int64, keep_gil=True)
    return int(hash_words(len(words), (int64 * len(words))(*words)))
