"""Newton-Schulz iterations of matrices, whose products are decided in C (csrc/core/muon_iteration.c).

On the CPU they are made from C, too (tx_torch_orthogonalise), several matrices at a time; on a GPU by torch, from here.
"""

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_ext.native import dtypes as native_dtypes
from torch_ext.native import library, structs
from torch_ext.optim.muon.hyper import ITERATIONS

RESTART = {torch.float32: 0, torch.bfloat16: 3}
"""Steps of the Gram iteration after which it begins anew; 0: never."""

NON_FINITE = "the products of its Newton-Schulz iteration are not finite"

_TAME = 2.0**40  # norms up to it, and from its reciprocal on, are squared in fp32 without harm
_REFUSED = "torch could not multiply its matrices, for lack of memory as a rule"

_ADD_PRODUCT, _MIRRORED = 1, 2  # tx_muon_product_kind
_NOT_FINITE, _NOT_MADE = 1, 2  # tx_muon_outcome


class NonFiniteProducts(RuntimeError):
    """Of a matrix and a norm that are finite, which no legal iteration makes."""


class Iteration(NamedTuple):
    """How the matrices of a parameter are orthogonalised."""

    coefficients: tuple[float, float, float]
    steps: int
    eps: float  # norms are at least that
    kind: str  # of ITERATIONS


@structs.mirror("tx_muon_iteration")
class _Iteration(library.Struct):
    """Of one matrix."""


@structs.mirror("tx_muon_product")
class _Product(library.Struct):
    """One of an iteration's."""


@structs.mirror("tx_muon_job")
class _Job(library.Struct):
    """One matrix."""


@functools.cache
def operations(rows: int, columns: int, steps: int, kind: str, dtype: torch.dtype) -> float:
    """Multiplications and additions of all products (tx_muon_operations)."""
    int64 = ctypes.c_int64
    count: Callable[..., float] = library.function(
        "tx_muon_operations", int64, int64, int64, ctypes.c_int32, int64, restype=ctypes.c_double, brief=True
    )
    return count(rows, columns, steps, ITERATIONS.index(kind), RESTART[dtype])


@functools.cache
def lanes(rows: int, columns: int, dtype: torch.dtype, threads: int) -> int:
    """How many matrices like this one are multiplied at a time (tx_muon_lanes); 0: each by all threads."""
    int64 = ctypes.c_int64
    count: Callable[..., int] = library.function(
        "tx_muon_lanes", int64, int64, ctypes.c_int32, int64, restype=int64, brief=True
    )
    return count(rows, columns, native_dtypes.code_of(dtype), threads)


class Workspace:
    """Memory of one matrix's squares, from one orthogonalisation to the next."""

    def __init__(self, largest: int, dtype: torch.dtype, device: torch.device) -> None:
        """largest: the most that the smaller dimension of a matrix is."""
        self.squares = [torch.empty(largest * largest, dtype=dtype, device=device) for _ in range(4)]


class Task(NamedTuple):
    """A matrix to be orthogonalised."""

    x: Tensor  # is overwritten
    other: Tensor  # of its shape and dtype; both are contiguous
    norm: float  # x's, the root of the sum of squares
    iteration: Iteration
    workspace: Workspace
    alone: bool  # multiplied by one thread, beside others

    def scaled(self, panel: int) -> _Iteration:
        """In C's words. x is scaled where a scale would not do."""
        scale = 1.0 / max(self.norm, self.iteration.eps)
        if not 1 / _TAME <= scale <= _TAME:
            self.x.mul_(scale)
            scale = 1.0
        (a, b, c), (rows, columns) = self.iteration.coefficients, self.x.shape
        kind, restart = ITERATIONS.index(self.iteration.kind), RESTART[self.x.dtype]
        return _Iteration(rows, columns, self.iteration.steps, restart, panel, a, b, c, scale, kind)


def orthogonalise(tasks: Sequence[Task]) -> list[Tensor | Exception]:
    """Of each what it became, in its x or its other; or why it did not: NonFiniteProducts, or RuntimeError where torch
    had no memory. Those with `alone` are multiplied at the same time, before the rest."""
    for task in tasks:
        if task.norm == 0.0:
            task.x.zero_()
    given = [task for task in tasks if task.norm != 0.0]
    made = iter(_on_cpu(given) if all(task.x.is_cpu for task in given) else [_by_torch(task) for task in given])
    return [task.x if task.norm == 0.0 else next(made) for task in tasks]


def _on_cpu(tasks: Sequence[Task]) -> list[Tensor | Exception]:
    iterations = [task.scaled(0) for task in tasks]
    rows = (
        _Job(
            ctypes.addressof(iteration),
            *(t.data_ptr() for t in (task.x, task.other, *task.workspace.squares)),
            *(native_dtypes.code_of(task.x.dtype), task.alone),
        )
        for task, iteration in zip(tasks, iterations, strict=True)
    )
    jobs = (_Job * max(1, len(tasks)))(*rows)
    library.function("tx_torch_orthogonalise", ctypes.c_void_p, ctypes.c_int64)(jobs, len(tasks))
    return [_result(task, job) for task, job in zip(tasks, jobs, strict=False)]


def _result(task: Task, job: Any) -> Tensor | Exception:
    if job.outcome == _NOT_FINITE:
        return NonFiniteProducts(NON_FINITE)
    if job.outcome == _NOT_MADE:
        return RuntimeError(_REFUSED)
    return task.other if job.found else task.x


def _by_torch(task: Task) -> Tensor | Exception:
    n = min(task.x.shape)
    iteration, memory = task.scaled(n), [task.x, task.other, *(s[: n * n].view(n, n) for s in task.workspace.squares)]
    find: Callable[..., int] = library.function(
        "tx_muon_products", *[ctypes.c_void_p] * 2, ctypes.c_int64, *[ctypes.c_void_p] * 2, restype=ctypes.c_int64
    )
    found, last = ctypes.c_int32(), ctypes.c_int32()
    ends = ctypes.byref(found), ctypes.byref(last)
    products = (_Product * find(ctypes.byref(iteration), None, 0, *ends))()
    find(ctypes.byref(iteration), products, len(products), *ends)
    for p in products:
        assert p.kind != _MIRRORED  # of one panel there is nothing to be copied
        out = memory[p.out]
        if p.kind != _ADD_PRODUCT:
            out.diagonal().add_(p.alpha)
            continue
        left, right = memory[p.left], memory[p.right]
        left, right = left.T if p.left_transposed else left, right.T if p.right_transposed else right
        torch.addmm(memory[p.added], left, right, beta=p.beta, alpha=p.alpha, out=out)
    if not bool(torch.isfinite(memory[last.value].sum(dtype=torch.float32))):
        return NonFiniteProducts(NON_FINITE)
    return memory[found.value]
