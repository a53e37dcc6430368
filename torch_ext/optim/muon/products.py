"""The products of Muon's matrices, one after the other, in memory that is kept from step to step.

Note: bits. A matrix multiplication may depend on where in memory its operands begin, so they begin at cache lines in
every world. What is orthogonalised was rounded to the dtype in which it travels, also where it does not; its norm is
taken of the rounded elements, which are all that the owner of a matrix has of the others' parts.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
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


class Part(NamedTuple):
    """A matrix to be orthogonalised."""

    member: MatrixMember
    matrix: Matrix
    momentum: Tensor  # flat, in the dtype that travels; is overwritten

    def install(self, found: Tensor) -> None:
        """What it became, where its momentum was."""
        if found.data_ptr() != self.momentum.data_ptr():
            self.momentum.copy_(found)


class _Lane(NamedTuple):
    """Memory of one matrix's products."""

    matrices: tuple[Tensor, Tensor]  # the first only where one is not multiplied in place
    squares: newton_schulz.Workspace


class _Memory(NamedTuple):
    """Of the products in one dtype."""

    momentum: Tensor  # bytes: of parameters that this rank has to itself
    slot: int  # bytes from one of these to the next
    lanes: list[_Lane]  # of matrices that are multiplied at a time; others take the first


class Products:
    """Of one optimizer."""

    def __init__(self) -> None:
        self._memory: dict[torch.dtype, _Memory] = {}
        self._made_for: tuple[int, list[torch.dtype]] = 0, []  # threads, and dtypes of the members
        self._threads = 0

    def reserve(self, members: Sequence[MatrixMember]) -> None:
        """MemoryError, naming the parameter, where there is not enough for these."""
        threads = torch.get_num_threads() if members[0].device.type == "cpu" else 1
        made_for = threads, [m.ns_dtype for m in members]
        if made_for == self._made_for:
            return
        self._memory.clear()
        for dtype in dict.fromkeys(made_for[1]):
            self._memory[dtype] = _made([m for m in members if m.ns_dtype is dtype], dtype, threads)
        self._threads, self._made_for = threads, made_for

    def windows(self, members: Sequence[MatrixMember]) -> Iterator[list[MatrixMember]]:
        """Members, of those that no other rank shares, whose momentum is made at a time: as many as give each lane a
        matrix, those with most operations first, so that lanes are busy to the end."""
        window: list[MatrixMember] = []
        for m in sorted(members, key=lambda m: -max(m.operations())):
            beside = len(self._memory[m.ns_dtype].lanes) if self._is_beside(m) else 1
            if window and (beside < 2 or window[0].ns_dtype is not m.ns_dtype):
                yield window
                window = []
            window.append(m)
            if beside < 2 or len(window) == beside or sum(len(one.matrices) for one in window) % beside == 0:
                yield window
                window = []
        if window:
            yield window

    def momentum_of(self, member: MatrixMember, in_window: int) -> Tensor:
        """Memory for what is orthogonalised of a member of a window; valid until the next window."""
        memory, n = self._memory[member.ns_dtype], member.weight.numel()
        begin = in_window * memory.slot
        return memory.momentum[begin : begin + n * member.travels.itemsize].view(member.travels)

    def orthogonalised(self, parts: Iterable[Part]) -> Iterator[tuple[Part, Tensor | Exception]]:
        """Each with its update, flat and in the dtype that travels, where the momentum was or in memory of these
        products, valid until the next one; or with why there is none: NonFiniteProducts, or what kept it from being
        made. Takes as many parts at a time as are multiplied at a time, when the first of them is asked for."""
        batch: list[Part] = []
        for part in parts:
            room = len(self._memory[part.member.ns_dtype].lanes) if self._is_lane(part) else 1
            if batch and (len(batch) >= room or batch[0].member.ns_dtype is not part.member.ns_dtype):
                yield from self._made_of(batch)
                batch = []
            batch.append(part)
            if len(batch) >= room:
                yield from self._made_of(batch)
                batch = []
        if batch:
            yield from self._made_of(batch)

    def _made_of(self, batch: list[Part]) -> list[tuple[Part, Tensor | Exception]]:
        try:
            lanes = self._memory[batch[0].member.ns_dtype].lanes
            tasks = [self._task(part, lane) for part, lane in zip(batch, lanes, strict=False)]
            found = newton_schulz.orthogonalise(tasks)
        except (RuntimeError, MemoryError) as error:
            return [(part, error) for part in batch]
        return [(part, _as_travels(part, one)) for part, one in zip(batch, found, strict=True)]

    def _task(self, part: Part, lane: _Lane) -> newton_schulz.Task:
        member, m = part.member, part.matrix
        first, other = (one[: m.numel] for one in lane.matrices)
        x, shape = part.momentum, (m.rows, m.columns)
        if not _is_aligned(x, member.ns_dtype):
            x = first.copy_(x)
        alone = self._is_lane(part)
        return newton_schulz.Task(
            x.view(shape), other.view(shape), norm_of(x), member.iteration(), lane.squares, alone
        )

    def _is_lane(self, part: Part) -> bool:
        m = part.matrix
        return newton_schulz.lanes(m.rows, m.columns, part.member.ns_dtype, self._threads) > 0

    def _is_beside(self, member: MatrixMember) -> bool:
        return all(newton_schulz.lanes(m.rows, m.columns, member.ns_dtype, self._threads) for m in member.matrices)


def _as_travels(part: Part, found: Tensor | Exception) -> Tensor | Exception:
    if isinstance(found, Exception):
        return found
    return found.view(-1) if found.dtype is part.momentum.dtype else part.momentum.copy_(found.view(-1))


def _is_aligned(part: Tensor, dtype: torch.dtype) -> bool:
    return part.dtype is dtype and part.data_ptr() % _CACHE_LINE == 0


def _in_place(member: MatrixMember) -> bool:
    """Whether all of its matrices are multiplied where their momentum lies."""
    itemsize = member.travels.itemsize
    return member.travels is member.ns_dtype and not any(m.begin * itemsize % _CACHE_LINE for m in member.matrices)


def _made(members: Sequence[MatrixMember], dtype: torch.dtype, threads: int) -> _Memory:
    """As csrc/core/muon_memory.c counts it."""
    everything = [(m, one) for m in members for one in m.matrices]
    beside = [(m, one) for m, one in everything if newton_schulz.lanes(one.rows, one.columns, dtype, threads)]
    shared_out = [one for one in beside if one[0].sharing is None or one[0].sharing.runs is None]
    lanes, copied, device = min(threads, len(shared_out)), not all(map(_in_place, members)), members[0].device
    alone = [m for m in members if m.sharing is None]
    slot = -(-max((_bytes(m) for m, _ in beside if m.sharing is None), default=0) // _CACHE_LINE) * _CACHE_LINE
    nbytes = max([*map(_bytes, alone), lanes * slot if lanes > 1 else 0])
    sizes = [_size(everything), *(_size(shared_out) for _ in range(lanes - 1))]
    try:
        return _Memory(
            torch.empty(nbytes, dtype=torch.uint8, device=device), slot, [_lane(*s, copied, dtype, device) for s in sizes]
        )
    except (RuntimeError, MemoryError):
        nbytes += sum((1 + copied) * numel + 4 * side * side for numel, side in sizes) * dtype.itemsize
        largest = max(members, key=lambda m: m.largest.numel)
        raise MemoryError(
            f"no memory for the products of Muon's matrices: {nbytes} bytes, {lanes or 1} times for the "
            f"{sizes[0][0]} elements of a matrix of {largest.name} and squares of {sizes[0][1]} of "
            f"{max(members, key=lambda m: m.widest).name}; nothing was stepped. Give these to AdamW, or split them"
        ) from None


def _bytes(member: MatrixMember) -> int:
    return member.weight.numel() * member.travels.itemsize


def _size(matrices: Sequence[tuple[MatrixMember, Matrix]]) -> tuple[int, int]:
    """Elements of the largest, and the largest smaller dimension."""
    return max(m.numel for _, m in matrices), max(min(m.rows, m.columns) for _, m in matrices)


def _lane(numel: int, side: int, copied: bool, dtype: torch.dtype, device: torch.device) -> _Lane:
    first, other = (torch.empty(n, dtype=dtype, device=device) for n in (numel if copied else 0, numel))
    return _Lane((first, other), newton_schulz.Workspace(side, dtype, device))
