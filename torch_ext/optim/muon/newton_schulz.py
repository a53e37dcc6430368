"""Orthogonalises matrices by Newton-Schulz iterations. C decides the sequence of products (csrc/core/muon_iteration.c).

On the CPU, C also runs the products (tx_torch_orthogonalise), of several matrices in parallel. On a GPU
`stacked_products` runs them with torch.
"""

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_ext.native import constants, library, structs
from torch_ext.native import dtypes as native_dtypes
from torch_ext.optim.muon.hyper import ITERATIONS
from torch_ext.optim.step_progress import NotStepped

RESTART = {torch.float32: 0, torch.bfloat16: 3}
"""Dtype of the products -> number of steps after which the Gram iteration restarts; 0: never."""

NON_FINITE = "the products of its Newton-Schulz iteration are not finite"

_REFUSED = "torch could not multiply its matrices, usually because memory ran out"


class NonFiniteProducts(NotStepped):
    """Raised if products of a finite matrix with a finite norm are not finite; no legal iteration leads to that."""


class Iteration(NamedTuple):
    """The settings with which a parameter's matrices are orthogonalised."""

    coefficients: tuple[float, float, float]
    steps: int
    eps: float  # lower bound of the norm that a matrix is divided by
    kind: str  # one of ITERATIONS


@structs.mirror("tx_muon_iteration")
class _Iteration(library.Struct):
    """tx_muon_iteration: the iteration of one matrix."""


@structs.mirror("tx_muon_product")
class _Product(library.Struct):
    """tx_muon_product: one product of an iteration."""


@structs.mirror("tx_muon_job")
class _Job(library.Struct):
    """tx_muon_job: a matrix to orthogonalise on the CPU, and the outcome."""


@structs.mirror("tx_muon_workspace")
class _Workspace(library.Struct):
    """tx_muon_workspace: the addresses of a `Workspace`."""


@functools.cache
def operations(rows: int, columns: int, steps: int, kind: str, dtype: torch.dtype, panel: int = 0) -> float:
    """Returns the multiplications and additions of all products (tx_muon_operations). The number is the same on every
    machine, unless `panel`, the panel width of symmetric products, is given."""
    int64 = ctypes.c_int64
    count: Callable[..., float] = library.function(
        "tx_muon_operations", int64, int64, int64, ctypes.c_int32, int64, int64, restype=ctypes.c_double, keep_gil=True
    )
    return count(rows, columns, steps, ITERATIONS.index(kind), RESTART[dtype], panel)


@functools.cache
def lanes(rows: int, columns: int, dtype: torch.dtype, threads: int) -> int:
    """Returns how many matrices of this size are multiplied in parallel, each by one thread (tx_muon_lanes); 0: one
    after the other, each by all threads."""
    int64 = ctypes.c_int64
    count: Callable[..., int] = library.function(
        "tx_muon_lanes", int64, int64, ctypes.c_int32, int64, restype=int64, keep_gil=True
    )
    return count(rows, columns, native_dtypes.code_of(dtype), threads)


class Workspace:
    """Scratch memory for the orthogonalisation of one matrix, or of one stack, at a time, reused for the next one."""

    def __init__(self, numel: int, square: int, dtype: torch.dtype, device: torch.device) -> None:
        """numel: elements of the largest matrix. square: of the largest square of a matrix's smaller dimension."""
        self.other = torch.empty(numel, dtype=dtype, device=device)
        self.squares = [torch.empty(square, dtype=dtype, device=device) for _ in range(4)]

    def addresses(self) -> _Workspace:
        return _Workspace(*(t.data_ptr() for t in (self.other, *self.squares)))


def _in_c(rows: int, columns: int, iteration: Iteration, dtype: torch.dtype, panel: int) -> _Iteration:
    """panel: the panel width of symmetric products; 0: the processor's."""
    kind, restart = ITERATIONS.index(iteration.kind), RESTART[dtype]
    return _Iteration(rows, columns, iteration.steps, restart, panel, *iteration.coefficients, kind)


class ProductList(NamedTuple):
    """The products of an iteration, in order. Operands are numbered: the matrix, another one of its shape, and the four
    squares of a workspace."""

    products: Sequence[_Product]
    result: int  # the operand that holds the result
    last_square: int  # the square that the result was last multiplied by, which is finite if the result is


@functools.cache
def products_of(rows: int, columns: int, iteration: Iteration, dtype: torch.dtype) -> ProductList:
    """Returns the products that orthogonalise a matrix of this size, symmetric ones not divided into panels. dtype: of
    the products."""
    pointer, within = ctypes.c_void_p, _in_c(rows, columns, iteration, dtype, min(rows, columns))
    find: Callable[..., int] = library.function(
        "tx_muon_products", pointer, pointer, ctypes.c_int64, pointer, pointer, restype=ctypes.c_int64
    )
    result, last = ctypes.c_int32(), ctypes.c_int32()
    ends = ctypes.byref(result), ctypes.byref(last)
    products = (_Product * find(ctypes.byref(within), None, 0, *ends))()
    find(ctypes.byref(within), products, len(products), *ends)
    return ProductList(list(products), result.value, last.value)


class Task(NamedTuple):
    """A matrix to orthogonalise."""

    x: Tensor  # contiguous; overwritten by the result
    norm: float  # the root of the sum of squares
    iteration: Iteration
    one_thread: bool  # multiplied by a single thread, in parallel with other matrices

    def begin(self) -> _Iteration:
        """Divides x by its norm, as torch.optim.Muon does. Returns the iteration as C's struct."""
        self.x.mul_(1.0 / max(self.norm, self.iteration.eps))
        rows, columns = self.x.shape
        return _in_c(rows, columns, self.iteration, self.x.dtype, 0)


def orthogonalise(tasks: Sequence[Task], workspaces: Sequence[Workspace]) -> list[Exception | None]:
    """Orthogonalises matrices on the CPU, in place: in C, which calls torch's matrix products. Tasks with `one_thread`
    come first, as many in parallel as there are workspaces. Returns for each None, or why it failed: NonFiniteProducts,
    or RuntimeError if torch could not allocate memory."""
    for task in tasks:
        if task.norm == 0.0:
            task.x.zero_()
    given = [task for task in tasks if task.norm != 0.0]
    iterations = [task.begin() for task in given]
    jobs = (_Job * max(1, len(given)))(
        *(
            _Job(ctypes.addressof(iteration), task.x.data_ptr(), native_dtypes.code_of(task.x.dtype), task.one_thread)
            for task, iteration in zip(given, iterations, strict=True)
        )
    )
    memory = (_Workspace * len(workspaces))(*(one.addresses() for one in workspaces))
    pointer, int64 = ctypes.c_void_p, ctypes.c_int64
    make = library.function("tx_torch_orthogonalise", pointer, int64, pointer, int64)
    make(jobs, len(given), memory, len(workspaces))
    made = iter([_failure(job.outcome) for job in jobs[: len(given)]])
    return [None if task.norm == 0.0 else next(made) for task in tasks]


def _failure(outcome: int) -> Exception | None:
    if outcome == constants.MUON_ORTHOGONAL:
        return None
    return NonFiniteProducts(NON_FINITE) if outcome == constants.MUON_NOT_FINITE else RuntimeError(_REFUSED)
