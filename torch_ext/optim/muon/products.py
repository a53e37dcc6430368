"""The products of Muon's matrices, one after the other, in memory that is kept from step to step.

Note: bits. A matrix multiplication may depend on where in memory its operands begin, so they begin at cache lines in
every world. What is orthogonalised was rounded to the dtype in which it travels, also where it does not; its norm is
taken of the rounded elements, which are all that the owner of a matrix has of the others' parts.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_ext.grads import stats as grads_stats
from torch_ext.native import ops
from torch_ext.optim.muon import newton_schulz
from torch_ext.optim.muon.matrix_forms import Matrix
from torch_ext.optim.muon.matrix_member import MatrixMember
from torch_ext.tensors import dense

_CACHE_LINE = 64  # bytes


def norm_of(x: Tensor) -> float:
    """The root of the sum of squares, whose bits depend on no thread; NaN where an element is not finite."""
    stats, _ = grads_stats.of([x], x.device)
    norm, unused = x.new_zeros((), dtype=torch.float64), x.new_zeros(2, dtype=torch.float32)
    ops.call_unversioned("grad_norm_", stats, dense.NONE, math.inf, norm, unused[0], unused[1])
    return float(norm)


class _Memory(NamedTuple):
    """Of the products in one dtype."""

    momentum: Tensor  # bytes: of the largest parameter that this rank has to itself
    matrices: tuple[Tensor, Tensor]  # each for the largest matrix; the first only where one is not multiplied in place
    squares: newton_schulz.Workspace


class Products:
    """Of one optimizer."""

    def __init__(self) -> None:
        self._memory: dict[torch.dtype, _Memory] = {}
        self._dtypes: list[torch.dtype] = []  # of the members for which it was reserved

    def reserve(self, members: Sequence[MatrixMember]) -> None:
        """MemoryError, naming the parameter, where there is not enough for these."""
        dtypes = [m.ns_dtype for m in members]
        if dtypes == self._dtypes:
            return
        self._memory.clear()
        for dtype in dict.fromkeys(dtypes):
            self._memory[dtype] = _made([m for m in members if m.ns_dtype is dtype], dtype)
        self._dtypes = dtypes

    def momentum_of(self, member: MatrixMember) -> Tensor:
        """Memory for what is orthogonalised of a parameter that no other rank shares; valid until the next call."""
        memory, n = self._memory[member.ns_dtype].momentum, member.weight.numel()
        return memory[: n * member.travels.itemsize].view(member.travels)

    def orthogonalised(self, member: MatrixMember, m: Matrix, part: Tensor) -> Tensor:
        """The update of a matrix from `part`, its momentum, which is overwritten: flat, in the dtype that travels,
        there or in memory of these products, valid until the next call. NonFiniteProducts where one is not finite."""
        memory, shape = self._memory[member.ns_dtype], (m.rows, m.columns)
        first, other = (one[: m.numel] for one in memory.matrices)
        x = part if _is_aligned(part, member.ns_dtype) else first.copy_(part)
        found = newton_schulz.orthogonalise(
            x.view(shape), other.view(shape), norm_of(x), member.iteration(), memory.squares
        ).view(-1)
        return found if found.dtype is part.dtype else part.copy_(found)

    def orthogonalise(self, member: MatrixMember, m: Matrix, part: Tensor) -> None:
        """As `orthogonalised`, into `part`."""
        found = self.orthogonalised(member, m, part)
        if found.data_ptr() != part.data_ptr():
            part.copy_(found)

    def orthogonalise_or_mark(self, member: MatrixMember, m: Matrix, part: Tensor) -> None:
        """As `orthogonalise`, for ranks that wait for the update: it is NaN where a product is not finite."""
        try:
            self.orthogonalise(member, m, part)
        except newton_schulz.NonFiniteProducts:
            part.fill_(torch.nan)


def _is_aligned(part: Tensor, dtype: torch.dtype) -> bool:
    return part.dtype is dtype and part.data_ptr() % _CACHE_LINE == 0


def _in_place(member: MatrixMember) -> bool:
    """Whether all of its matrices are multiplied where their momentum lies."""
    itemsize = member.travels.itemsize
    return member.travels is member.ns_dtype and not any(m.begin * itemsize % _CACHE_LINE for m in member.matrices)


def _made(members: Sequence[MatrixMember], dtype: torch.dtype) -> _Memory:
    largest = max(members, key=lambda m: m.largest.numel)
    widest = max(members, key=lambda m: m.widest)
    alone = [m.weight.numel() * m.travels.itemsize for m in members if m.sharing is None]
    numel, square, nbytes = largest.largest.numel, widest.widest, max(alone, default=0)
    copied, device = 0 if all(map(_in_place, members)) else numel, members[0].device
    try:
        return _Memory(
            torch.empty(nbytes, dtype=torch.uint8, device=device),
            (torch.empty(copied, dtype=dtype, device=device), torch.empty(numel, dtype=dtype, device=device)),
            newton_schulz.Workspace(square, dtype, device),
        )
    except (RuntimeError, MemoryError):
        nbytes += (copied + numel + 4 * square * square) * dtype.itemsize
        raise MemoryError(
            f"no memory for the products of Muon's matrices: {nbytes} bytes, for the {numel} elements of a matrix of "
            f"{largest.name} and squares of {square} of {widest.name}; nothing was stepped. Give these to AdamW, or "
            "split them"
        ) from None
