"""Runs the matrix products of Muon, in memory that is kept from step to step. Small matrices are multiplied in parallel
in lanes: a lane is one thread that multiplies whole matrices (newton_schulz.lanes).

Note: bits. The result must not depend on the number of ranks. The bits of a matrix multiplication may depend on the
alignment of its operands, so operands always begin at cache lines. The momentum is rounded to the transfer dtype, even
if nothing is sent. The norm is computed from the rounded elements: the owner of a sharded matrix has no others.
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
    """Returns the root of the sum of squares, with bits that do not depend on threads; NaN if an element is not
    finite."""
    stats, _ = grads_stats.of([x], x.device)
    norm, unused = x.new_zeros((), dtype=torch.float64), x.new_zeros(2, dtype=torch.float32)
    ops.call_unversioned("grad_norm_", stats, dense.EMPTY, math.inf, norm, unused[0], unused[1])
    return float(norm)


class Part(NamedTuple):
    """A matrix to orthogonalise."""

    member: MatrixMember
    matrix: Matrix
    momentum: Tensor  # flat, in the transfer dtype; overwritten by the update


class _Memory(NamedTuple):
    """Memory for the products in one dtype."""

    momentum: Tensor  # bytes, for parameters that no other rank shares; divided into slots
    slot: int  # bytes of one parameter's slot
    copies: list[Tensor]  # one per workspace, for matrices that cannot be multiplied in place
    workspaces: list[newton_schulz.Workspace]  # one per lane; a matrix that all threads multiply uses the first


class Products:
    """The matrix products of one optimizer, and their memory."""

    def __init__(self) -> None:
        self._memory: dict[torch.dtype, _Memory] = {}
        self._reserved_for: tuple[int, list[torch.dtype]] = 0, []  # threads, and dtypes of the members
        self._threads = 0

    def reserve(self, members: Sequence[MatrixMember]) -> None:
        """Allocates the memory for these members, unless it is there already. Raises MemoryError, naming the largest
        parameters, if there is not enough."""
        threads = torch.get_num_threads() if members[0].device.type == "cpu" else 1
        required = threads, [m.ns_dtype for m in members]
        if required == self._reserved_for:
            return
        self._memory.clear()
        for dtype in dict.fromkeys(required[1]):
            self._memory[dtype] = _reserved([m for m in members if m.ns_dtype is dtype], dtype, threads)
        self._threads, self._reserved_for = threads, required

    def windows(self, members: Sequence[MatrixMember]) -> Iterator[list[MatrixMember]]:
        """Divides members that no other rank shares into windows; the momentum of a window is computed together. A
        window has enough matrices for every lane, and members with most operations come first, so that all lanes end at
        about the same time."""
        window: list[MatrixMember] = []
        for m in sorted(members, key=lambda m: -max(m.operations())):
            most = self._window_size(m) if self._in_lanes(m) else 1
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
        """Returns the memory for the momentum of a member, by its position in the window; valid until the next
        window."""
        memory, n = self._memory[member.ns_dtype], member.weight.numel()
        begin = in_window * memory.slot
        return memory.momentum[begin : begin + n * member.transfer_dtype.itemsize].view(member.transfer_dtype)

    def orthogonalise(self, parts: Iterable[Part], per_lane: int = 1) -> Iterator[tuple[Part, Exception | None]]:
        """Orthogonalises the parts in place. Yields each part, with None or why it failed: NonFiniteProducts, or the
        error of the products. Lazy: when a result is asked for, takes the next batch of parts, which are as many as
        there are lanes, times per_lane if they are multiplied in place."""
        batch: list[Part] = []
        for part in parts:
            lanes = len(self._memory[part.member.ns_dtype].workspaces) if self._uses_lane(part) else 1
            room = lanes * (per_lane if lanes > 1 and _in_place(part.member) else 1)
            if batch and (len(batch) >= room or batch[0].member.ns_dtype is not part.member.ns_dtype):
                yield from self._made(batch)
                batch = []
            batch.append(part)
        if batch:
            yield from self._made(batch)

    def _made(self, batch: list[Part]) -> list[tuple[Part, Exception | None]]:
        """Orthogonalises a batch. Returns each part with None, or with why it failed."""
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
        return newton_schulz.Task(x.view(m.rows, m.columns), norm_of(x), part.member.iteration(), self._uses_lane(part))

    def _window_size(self, member: MatrixMember) -> int:
        """Returns the number of matrices that fills a window of this dtype: MUON_PER_LANE for every lane."""
        return len(self._memory[member.ns_dtype].workspaces) * constants.MUON_PER_LANE

    def _uses_lane(self, part: Part) -> bool:
        """Whether the matrix is multiplied in a lane, not by all threads."""
        m = part.matrix
        return newton_schulz.lanes(m.rows, m.columns, part.member.ns_dtype, self._threads) > 0

    def _in_lanes(self, member: MatrixMember) -> bool:
        """Whether all of the parameter's matrices are multiplied in lanes."""
        return all(newton_schulz.lanes(m.rows, m.columns, member.ns_dtype, self._threads) for m in member.matrices)


def _is_aligned(part: Tensor, dtype: torch.dtype) -> bool:
    return part.dtype is dtype and part.data_ptr() % _CACHE_LINE == 0


def _in_place(member: MatrixMember) -> bool:
    """Whether all of its matrices can be multiplied in place, in the memory of their momentum."""
    itemsize = member.transfer_dtype.itemsize
    return member.transfer_dtype is member.ns_dtype and not any(
        m.begin * itemsize % _CACHE_LINE for m in member.matrices
    )


def _reserved(members: Sequence[MatrixMember], dtype: torch.dtype, threads: int) -> _Memory:
    """Allocates the memory for the products in one dtype. csrc/core/muon_memory.c predicts the same number of bytes."""
    everything = [(m, one) for m in members for one in m.matrices]
    beside = [(m, one) for m, one in everything if newton_schulz.lanes(one.rows, one.columns, dtype, threads)]
    not_sharded = [(m, one) for m, one in beside if m.sharing is None or m.sharing.runs is None]
    whole = [_bytes(m) for m in members if m.sharing is None]
    slots = [-(-_bytes(m) // _CACHE_LINE) * _CACHE_LINE for m, _ in beside if m.sharing is None]
    sizes = [_size(everything), *(_size(not_sharded) for _ in range(min(threads, len(not_sharded)) - 1))]
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
    return member.weight.numel() * member.transfer_dtype.itemsize


def _size(matrices: Sequence[tuple[MatrixMember, Matrix]]) -> tuple[int, int]:
    """Returns the elements of the largest matrix, and the largest of the smaller dimensions."""
    return max(m.numel for _, m in matrices), max(min(m.rows, m.columns) for _, m in matrices)
