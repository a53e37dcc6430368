"""Where matrices are multiplied: in the memory of their momentum if that begins at a cache line and has the dtype of
the products, else in a copy."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_ext.optim.muon.matrix_member import MatrixMember

_CACHE_LINE = 64  # bytes


def slot_bytes(member: MatrixMember) -> int:
    """Returns the bytes of a parameter's momentum, up to the next cache line."""
    nbytes = momentum_bytes(member)
    return nbytes + -nbytes % _CACHE_LINE


def momentum_bytes(member: MatrixMember) -> int:
    return member.weight.numel() * member.transfer_dtype.itemsize


def in_place(member: MatrixMember) -> bool:
    """Whether all of its matrices can be multiplied in the memory of their momentum."""
    itemsize = member.transfer_dtype.itemsize
    return member.transfer_dtype is member.ns_dtype and not any(
        m.begin * itemsize % _CACHE_LINE for m in member.matrices
    )


def is_aligned(momentum: Tensor, dtype: torch.dtype) -> bool:
    """Whether a matrix can be multiplied, in this dtype, where its momentum is."""
    return momentum.dtype is dtype and momentum.data_ptr() % _CACHE_LINE == 0


def out_of_memory(members: Sequence[MatrixMember], nbytes: int, at_a_time: str) -> MemoryError:
    """Returns the exception to raise where there is no memory for the products."""
    largest, widest = max(members, key=lambda m: m.largest.numel), max(members, key=lambda m: m.widest)
    return MemoryError(
        f"no memory for the products of Muon's matrices: {nbytes} bytes, for the {largest.largest.numel} elements "
        f"of a matrix of {largest.name} and squares of {widest.widest} of {widest.name}, {at_a_time}; "
        "nothing was stepped. Give these to AdamW, or split them"
    )
