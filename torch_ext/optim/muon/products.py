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
from torch_ext.native import constants, ops
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
    momentum: Tensor  # flat, in the dtype that travels; becomes the update


class _Memory(NamedTuple):
    """Of the products in one dtype."""

    momentum: Tensor  # bytes: of parameters that this rank has to itself
    slot: int  # bytes from one of these to the next
    copies: list[Tensor]  # of matrices that are not multiplied in place, for each workspace
    workspaces: list[newton_schulz.Workspace]  # for matrices that are multiplied at a time; others take the first


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
            self._memory[dtype] = _reserved([m for m in members if m.ns_dtype is dtype], dtype, threads)
        self._threads, self._made_for = threads, made_for

    def windows(self, members: Sequence[MatrixMember]) -> Iterator[list[MatrixMember]]:
        """Members, of those that no other rank shares, whose momentum is made at a time: so many that each lane has
        matrices, those with most operations first, so that lanes end at about the same time."""
        window: list[MatrixMember] = []
        for m in sorted(members, key=lambda m: -max(m.operations())):
            most = self._at_a_time(m) if self._is_beside(m) else 1
            if window and (most == 1 or window[0].ns_dtype is not m.ns_dtype):
                yield window
                window = []
            window.append(m)
            if sum(len(one.matrices) for one in window) >= most:
                yield window
                window = []
        if window:
            yield window

    def momentum_of(self, member: MatrixMember, in_window: int) -> Tensor:
        """Memory for what is orthogonalised of a member of a window; valid until the next window."""
        memory, n = self._memory[member.ns_dtype], member.weight.numel()
        begin = in_window * memory.slot
        return memory.momentum[begin : begin + n * member.travels.itemsize].view(member.travels)

    def orthogonalise(self, parts: Iterable[Part], per_lane: int = 1) -> Iterator[tuple[Part, Exception | None]]:
        """Each when it is an update, or with why it is none: NonFiniteProducts, or what kept it from being made. Takes
        as many parts at once as are multiplied at a time, times per_lane, when the first of them is asked for."""
        batch: list[Part] = []
        for part in parts:
            lanes = len(self._memory[part.member.ns_dtype].workspaces) if self._is_lane(part) else 1
            room = lanes * (per_lane if lanes > 1 and _in_place(part.member) else 1)
            if batch and (len(batch) >= room or batch[0].member.ns_dtype is not part.member.ns_dtype):
                yield from self._made(batch)
                batch = []
            batch.append(part)
        if batch:
            yield from self._made(batch)

    def _made(self, batch: list[Part]) -> list[tuple[Part, Exception | None]]:
        memory = self._memory[batch[0].member.ns_dtype]
        try:
            tasks = [self._task(part, memory.copies[i % len(memory.copies)]) for i, part in enumerate(batch)]
            failures = newton_schulz.orthogonalise(tasks, memory.workspaces)
        except (RuntimeError, MemoryError) as error:
            return [(part, error) for part in batch]
        for part, task in zip(batch, tasks, strict=True):
            if task.x.data_ptr() != part.momentum.data_ptr():
                part.momentum.copy_(task.x.view(-1))
        return list(zip(batch, failures, strict=True))

    def _task(self, part: Part, copy: Tensor) -> newton_schulz.Task:
        m, x = part.matrix, part.momentum
        if not _is_aligned(x, part.member.ns_dtype):
            x = copy[: m.numel].copy_(x)
        return newton_schulz.Task(x.view(m.rows, m.columns), norm_of(x), part.member.iteration(), self._is_lane(part))

    def _at_a_time(self, member: MatrixMember) -> int:
        return len(self._memory[member.ns_dtype].workspaces) * constants.MUON_PER_LANE

    def _is_lane(self, part: Part) -> bool:
        m = part.matrix
        return newton_schulz.lanes(m.rows, m.columns, part.member.ns_dtype, self._threads) > 0

    def _is_beside(self, member: MatrixMember) -> bool:
        return all(newton_schulz.lanes(m.rows, m.columns, member.ns_dtype, self._threads) for m in member.matrices)


def _is_aligned(part: Tensor, dtype: torch.dtype) -> bool:
    return part.dtype is dtype and part.data_ptr() % _CACHE_LINE == 0


def _in_place(member: MatrixMember) -> bool:
    """Whether all of its matrices are multiplied where their momentum lies."""
    itemsize = member.travels.itemsize
    return member.travels is member.ns_dtype and not any(m.begin * itemsize % _CACHE_LINE for m in member.matrices)


def _reserved(members: Sequence[MatrixMember], dtype: torch.dtype, threads: int) -> _Memory:
    """As csrc/core/muon_memory.c counts it."""
    everything = [(m, one) for m in members for one in m.matrices]
    beside = [(m, one) for m, one in everything if newton_schulz.lanes(one.rows, one.columns, dtype, threads)]
    not_cut = [(m, one) for m, one in beside if m.sharing is None or m.sharing.runs is None]
    whole = [_bytes(m) for m in members if m.sharing is None]
    slots = [-(-_bytes(m) // _CACHE_LINE) * _CACHE_LINE for m, _ in beside if m.sharing is None]
    sizes = [_size(everything), *(_size(not_cut) for _ in range(min(threads, len(not_cut)) - 1))]
    slot, n_slots = max(slots, default=0), min(len(slots), threads * constants.MUON_PER_LANE)
    nbytes, copied = max([*whole, slot * n_slots if len(sizes) > 1 else 0]), not all(map(_in_place, members))
    device = members[0].device
    try:
        return _Memory(
            torch.empty(nbytes, dtype=torch.uint8, device=device),
            slot,
            [torch.empty(numel if copied else 0, dtype=dtype, device=device) for numel, _ in sizes],
            [newton_schulz.Workspace(numel, side, dtype, device) for numel, side in sizes],
        )
    except (RuntimeError, MemoryError):
        nbytes += sum((1 + copied) * numel + 4 * side * side for numel, side in sizes) * dtype.itemsize
        largest, widest = max(members, key=lambda m: m.largest.numel), max(members, key=lambda m: m.widest)
        raise MemoryError(
            f"no memory for the products of Muon's matrices: {nbytes} bytes, for the {largest.largest.numel} elements "
            f"of a matrix of {largest.name} and squares of {widest.widest} of {widest.name}, {len(sizes)} at a time; "
            "nothing was stepped. Give these to AdamW, or split them"
        ) from None


def _bytes(member: MatrixMember) -> int:
    return member.weight.numel() * member.travels.itemsize


def _size(matrices: Sequence[tuple[MatrixMember, Matrix]]) -> tuple[int, int]:
    """Elements of the largest, and the largest smaller dimension."""
    return max(m.numel for _, m in matrices), max(min(m.rows, m.columns) for _, m in matrices)
