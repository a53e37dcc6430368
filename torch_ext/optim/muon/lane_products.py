"""Runs the matrix products of Muon on the CPU, in memory that is kept from step to step. Small matrices are multiplied
in parallel in lanes: a lane is one thread that multiplies whole matrices (newton_schulz.lanes).

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
from torch_ext.optim.muon.matrix_member import MatrixMember, Part
from torch_ext.optim.muon.product_memory import in_place, is_aligned, momentum_bytes, out_of_memory, slot_bytes
from torch_ext.tensors import dense


def norm_of(x: Tensor) -> float:
    """Returns the root of the sum of squares, with bits that do not depend on threads; NaN if an element is not
    finite."""
    stats, _ = grads_stats.of([x], x.device)
    norm, unused = x.new_zeros((), dtype=torch.float64), x.new_zeros(2, dtype=torch.float32)
    ops.call_unversioned("grad_norm_", stats, dense.EMPTY, math.inf, norm, unused[0], unused[1])
    return float(norm)


class _Memory(NamedTuple):
    """Memory for the products in one dtype."""

    momentum: Tensor  # bytes, for parameters that no other rank shares; divided into slots
    slot: int  # bytes of one parameter's slot
    copies: list[Tensor]  # one per workspace, for matrices that cannot be multiplied in place
    workspaces: list[newton_schulz.Workspace]  # one per lane; a matrix that all threads multiply uses the first


class LaneProducts:
    """The matrix products of one optimizer on the CPU, and their memory. Implements `products.Products`."""

    def __init__(self) -> None:
        self._memory: dict[torch.dtype, _Memory] = {}
        self._reserved_for: tuple[int, list[torch.dtype]] = 0, []  # threads, and dtypes of the members
        self._threads = 0

    def reserve(self, members: Sequence[MatrixMember]) -> None:
        """Allocates the memory for these members, unless it is there already. Raises MemoryError, naming the largest
        parameters, if there is not enough."""
        threads = torch.get_num_threads()
        required = threads, [m.ns_dtype for m in members]
        if required == self._reserved_for:
            return
        self._memory.clear()
        self._reserved_for = 0, []
        for dtype in dict.fromkeys(required[1]):
            self._memory[dtype] = _reserved([m for m in members if m.ns_dtype is dtype], dtype, threads)
        self._threads, self._reserved_for = threads, required

    def windows(self, members: Sequence[MatrixMember]) -> Iterator[list[tuple[MatrixMember, Tensor]]]:
        """Divides members that no other rank shares into windows; the momentum of a window is computed together. Yields
        each window's members, with memory for their momentum, which is valid until the next window. A window has enough
        matrices for every lane, and members with most operations come first, so that all lanes end at about the same
        time."""
        window: list[MatrixMember] = []
        for m in sorted(members, key=lambda m: -max(m.operations())):
            most = self._window_size(m) if self._in_lanes(m) else 1
            if window and (most == 1 or window[0].ns_dtype is not m.ns_dtype):
                yield self._with_memory(window)
                window = []
            window.append(m)
            if sum(len(one.matrices) for one in window) >= most:
                yield self._with_memory(window)
                window = []
        if window:
            yield self._with_memory(window)

    def _with_memory(self, window: Sequence[MatrixMember]) -> list[tuple[MatrixMember, Tensor]]:
        memory, found = self._memory[window[0].ns_dtype], []
        for i, m in enumerate(window):
            begin, nbytes = i * memory.slot, momentum_bytes(m)
            found.append((m, memory.momentum[begin : begin + nbytes].view(m.transfer_dtype)))
        return found

    def orthogonalise(self, parts: Iterable[Part], window: bool = False) -> Iterator[tuple[Part, Exception | None]]:
        """See `products.Products`. Takes as many parts at a time as there are lanes; those of a window that are
        multiplied in place MUON_PER_LANE times as many."""
        per_lane = constants.MUON_PER_LANE if window else 1
        batch: list[Part] = []
        for part in parts:
            lanes = len(self._memory[part.member.ns_dtype].workspaces) if self._uses_lane(part) else 1
            room = lanes * (per_lane if lanes > 1 and in_place(part.member) else 1)
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
        if not is_aligned(x, part.member.ns_dtype):
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


def _reserved(members: Sequence[MatrixMember], dtype: torch.dtype, threads: int) -> _Memory:
    """Allocates the memory for the products in one dtype. csrc/core/muon_memory.c predicts the same number of bytes."""
    everything = [(m, one) for m in members for one in m.matrices]
    beside = [(m, one) for m, one in everything if newton_schulz.lanes(one.rows, one.columns, dtype, threads)]
    not_sharded = [(m, one) for m, one in beside if m.sharing is None or m.sharing.runs is None]
    whole = [momentum_bytes(m) for m in members if m.sharing is None]
    slots = [slot_bytes(m) for m, _ in beside if m.sharing is None]
    sizes = [_size(everything), *(_size(not_sharded) for _ in range(min(threads, len(not_sharded)) - 1))]
    slot, n_slots = max(slots, default=0), min(len(slots), threads * constants.MUON_PER_LANE)
    nbytes, copied = max([*whole, slot * n_slots if len(sizes) > 1 else 0]), not all(map(in_place, members))
    device = members[0].device
    try:
        return _Memory(
            torch.empty(nbytes, dtype=torch.uint8, device=device),
            slot,
            [torch.empty(numel if copied else 0, dtype=dtype, device=device) for numel, _ in sizes],
            [newton_schulz.Workspace(numel, square, dtype, device) for numel, square in sizes],
        )
    except (RuntimeError, MemoryError):
        nbytes += sum((1 + copied) * numel + 4 * square for numel, square in sizes) * dtype.itemsize
        raise out_of_memory(members, nbytes, f"{len(sizes)} at a time") from None


def _size(matrices: Sequence[tuple[MatrixMember, Matrix]]) -> tuple[int, int]:
    """Returns the elements of the largest matrix, and those of the largest square of a smaller dimension."""
    return max(m.numel for _, m in matrices), max(min(m.rows, m.columns) for _, m in matrices) ** 2
