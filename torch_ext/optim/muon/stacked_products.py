"""Runs the matrix products of Muon on a GPU, with torch, in memory that is kept from step to step.

Note [stacks of matrices]

Problem. Orthogonalising a matrix takes 15 to 30 calls of torch, each 10 to 20 us of the host. An H200 takes 1.2 us for
a product of 768 x 768, at its rate. And to know whether the products are finite, the host has to wait for the device.

So matrices of one shape are multiplied in stacks: each product of all of them is one call. How many are in a stack is
decided in C (tx_muon_stack). Where a stack's matrices lie at equal distances, as in the memory of a window, they are
multiplied in place, else copied. The host waits once for a window. Which matrices share a stack may change their bits,
as may the GPU that multiplies them.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from ctypes import c_int64
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from torch_ext.native import constants, library
from torch_ext.optim.muon import newton_schulz
from torch_ext.optim.muon.matrix_member import MatrixMember, Part
from torch_ext.optim.muon.newton_schulz import Iteration, NonFiniteProducts, Workspace
from torch_ext.optim.muon.product_memory import in_place, is_aligned, momentum_bytes, out_of_memory, slot_bytes


class _Memory(NamedTuple):
    """Memory for the products in one dtype."""

    momentum: Tensor  # bytes, for parameters that no other rank shares
    copies: Tensor  # for a stack that cannot be multiplied in place
    workspace: Workspace


class StackedProducts:
    """The matrix products of one optimizer on a GPU, and their memory. Implements `products.Products`."""

    def __init__(self) -> None:
        self._memory: dict[torch.dtype, _Memory] = {}
        self._reserved_for: list[torch.dtype] = []

    def reserve(self, members: Sequence[MatrixMember]) -> None:
        """Allocates the memory for these members, unless it is there already. Raises MemoryError, naming the largest
        parameters, if there is not enough."""
        required = [m.ns_dtype for m in members]
        if required == self._reserved_for:
            return
        self._memory.clear()
        self._reserved_for = []
        for dtype in dict.fromkeys(required):
            self._memory[dtype] = _reserved([m for m in members if m.ns_dtype is dtype], dtype)
        self._reserved_for = required

    def windows(self, members: Sequence[MatrixMember]) -> Iterator[list[tuple[MatrixMember, Tensor]]]:
        """Divides members that no other rank shares into windows of at most MUON_WINDOW bytes of momentum, or of one
        parameter. Matrices of one shape follow each other. See `products.Products`."""
        window: list[tuple[MatrixMember, Tensor]] = []
        used = 0
        for m in sorted(members, key=_shape):
            nbytes = slot_bytes(m)
            if window and (used + nbytes > constants.MUON_WINDOW or window[0][0].ns_dtype is not m.ns_dtype):
                yield window
                window, used = [], 0
            memory = self._memory[m.ns_dtype].momentum[used : used + momentum_bytes(m)]
            window.append((m, memory.view(m.transfer_dtype)))
            used += nbytes
        if window:
            yield window

    def orthogonalise(self, parts: Iterable[Part], window: bool = False) -> Iterator[tuple[Part, Exception | None]]:
        """See `products.Products`. Multiplies consecutive parts of one shape as a stack; waits for the device once for
        each stack, or once for a window."""
        made: list[_Made] = []
        for stack in _stacks(parts):
            made.append(self._multiplied(stack))
            if not window:
                yield from _outcomes(made)
                made = []
        yield from _outcomes(made)

    def _multiplied(self, parts: list[Part]) -> "_Made":
        """Orthogonalises a stack, without waiting for the device."""
        first = parts[0]
        memory = self._memory[first.member.ns_dtype]
        try:
            stack = _where_they_are(parts, memory.momentum)
            copied = stack is None
            if stack is None:
                stack = _copied(parts, memory.copies)
            result, finite = orthogonalised(stack, first.member.iteration(), memory.workspace)
            if copied:
                for part, update in zip(parts, result.reshape(len(parts), -1), strict=True):
                    part.momentum.copy_(update)
            elif result is not stack:
                stack.copy_(result)
        except (RuntimeError, MemoryError) as error:
            return _Made(parts, None, error)
        return _Made(parts, finite.view(-1), None)


class _Made(NamedTuple):
    """A stack that was multiplied."""

    parts: list[Part]
    finite: Tensor | None  # on the device: whether the products of each part are finite
    error: Exception | None  # why they could not be computed


def _outcomes(made: Sequence[_Made]) -> list[tuple[Part, Exception | None]]:
    """Waits for the device. Returns each part with None, or with why it failed."""
    flags = [one.finite for one in made if one.finite is not None]
    try:
        finite = iter(torch.cat(flags).tolist() if flags else [])
    except RuntimeError as error:  # of the device, which says that an earlier call failed
        return [(part, error) for one in made for part in one.parts]
    found: list[tuple[Part, Exception | None]] = []
    for one in made:
        for part in one.parts:
            failed = None if one.finite is None or next(finite) else NonFiniteProducts(newton_schulz.NON_FINITE)
            found.append((part, one.error or failed))
    return found


def _stacks(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """Divides parts into stacks: consecutive ones of one shape, at most tx_muon_stack."""
    stack: list[Part] = []
    kind: object = None
    for part in parts:
        before, kind = kind, _kind(part)
        if stack and (kind != before or len(stack) >= _stack_size(*part.matrix[1:])):
            yield stack
            stack = []
        stack.append(part)
    if stack:
        yield stack


def _shape(member: MatrixMember) -> tuple[int, ...]:
    """What members are sorted by, so that matrices of one shape follow each other."""
    return member.ns_dtype.itemsize, *member.largest[1:], len(member.matrices), member.state.group


def _kind(part: Part) -> object:
    """What is the same for all parts of a stack."""
    member = part.member
    return part.matrix[1:], member.ns_dtype, part.momentum.dtype, member.iteration()


@functools.cache
def _stack_size(rows: int, columns: int) -> int:
    """Returns the most matrices of a stack (tx_muon_stack)."""
    size: Callable[..., int] = library.function("tx_muon_stack", c_int64, c_int64, restype=c_int64, keep_gil=True)
    return size(rows, columns)


def _where_they_are(parts: Sequence[Part], window: Tensor) -> Tensor | None:
    """Returns a stack of the parts where they are; None if they have to be copied. window: `_Memory.momentum`."""
    (_, rows, columns), dtype = parts[0].matrix, parts[0].member.ns_dtype
    if not is_aligned(parts[0].momentum, dtype):
        return None
    if len(parts) == 1:
        return parts[0].momentum.view(rows, columns)
    places = [part.momentum.data_ptr() - window.data_ptr() for part in parts]
    distance = places[1] - places[0]
    if min(places) < 0 or max(places) >= window.numel() or {b - a for a, b in pairwise(places)} != {distance}:
        return None
    size, begin = dtype.itemsize, places[0]
    if distance % size or distance < rows * columns * size:
        return None
    elements = window[: window.numel() // size * size].view(dtype)
    return elements.as_strided((len(parts), rows, columns), (distance // size, columns, 1), begin // size)


def _copied(parts: Sequence[Part], copies: Tensor) -> Tensor:
    """Returns a stack of copies of the parts."""
    (_, rows, columns), n = parts[0].matrix, len(parts)
    stack = copies[: n * rows * columns]
    for part, copy in zip(parts, stack.view(n, -1), strict=True):
        copy.copy_(part.momentum)
    return stack.view(n, rows, columns) if n > 1 else stack.view(rows, columns)


def orthogonalised(stack: Tensor, iteration: Iteration, workspace: Workspace) -> tuple[Tensor, Tensor]:
    """Orthogonalises matrices of one shape: [rows, columns], or [matrices, rows, columns]. Overwrites them. Returns the
    results, in their memory or in the workspace's, and for each whether its products are finite. A matrix of zeros
    stays zero."""
    rows, columns = stack.shape[-2:]
    n, products = min(rows, columns), newton_schulz.products_of(rows, columns, iteration, stack.dtype)
    squares = (s[: stack.numel() // (rows * columns) * n * n].view(*stack.shape[:-2], n, n) for s in workspace.squares)
    memory = [stack, workspace.other[: stack.numel()].view(stack.shape), *squares]
    norms = torch.linalg.vector_norm(stack, dim=(-2, -1), keepdim=True, dtype=torch.float32)
    stack.mul_(norms.clamp_min(iteration.eps).reciprocal().float())  # fp32 already, unless a test has exact norms
    multiply = torch.addmm if stack.dim() == 2 else torch.baddbmm
    # Tensors in fp32, since a number would be rounded to the dtype of the products first.
    numbers = {p.alpha for p in products.products if p.kind == constants.MUON_SHIFTED}
    shifts = {alpha: torch.full((1,), alpha, dtype=torch.float32, device=stack.device) for alpha in numbers}
    for p in products.products:
        assert p.kind != constants.MUON_MIRRORED  # with a single panel no half has to be mirrored
        out = memory[p.out]
        if p.kind == constants.MUON_SHIFTED:
            out.diagonal(dim1=-2, dim2=-1).add_(shifts[p.alpha])
            continue
        left, right = memory[p.left], memory[p.right]
        left, right = left.mT if p.left_transposed else left, right.mT if p.right_transposed else right
        multiply(memory[p.added], left, right, beta=p.beta, alpha=p.alpha, out=out)
    finite = memory[products.last_square].sum(dim=(-2, -1), dtype=torch.float32).isfinite()
    return memory[products.result], finite


def _reserved(members: Sequence[MatrixMember], dtype: torch.dtype) -> _Memory:
    """Allocates the memory for the products in one dtype. csrc/core/muon_memory.c predicts the same number of bytes."""
    device, each = members[0].device, [one for m in members for one in m.matrices]
    replicated = any(m.sharing is not None and m.sharing.runs is None for m in members)
    alone = [slot_bytes(m) for m in members if m.sharing is None]
    most = constants.MUON_STACK if replicated or alone else 0
    numel = _limited([m.numel for m in each], most)
    square = _limited([min(m.rows, m.columns) ** 2 for m in each], most)
    momentum = _limited(alone, constants.MUON_WINDOW)
    # If all can be multiplied in place, the parts of a stack lie at equal distances: the matrices of a member begin at
    # cache lines, as members do.
    copied = numel if replicated or not all(map(in_place, members)) else 0
    try:
        return _Memory(
            torch.empty(momentum, dtype=torch.uint8, device=device),
            torch.empty(copied, dtype=dtype, device=device),
            Workspace(numel, square, dtype, device),
        )
    except (RuntimeError, MemoryError):
        nbytes = momentum + (copied + numel + 4 * square) * dtype.itemsize
        raise out_of_memory(members, nbytes, "in stacks of matrices") from None


def _limited(sizes: Sequence[int], most: int) -> int:
    """Returns what all need together, at most `most`, unless the largest needs more."""
    return max(max(sizes, default=0), min(sum(sizes), most))
