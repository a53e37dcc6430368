"""Newton-Schulz iterations: about the nearest matrix with orthonormal rows or columns, by matrix products alone.

A step takes each singular value s of X to a s + b s^3 + c s^5: X' = Q X with Q = a + b G + c G^2, G = X X^T.

Note: Gram Newton-Schulz (Dao AI Lab, 2026). All Q are polynomials of the first G, so they commute, and the product of
all steps is P X with P = Q_n ... Q_1. The iteration needs the small square matrices alone: G' = Q G Q, P' = Q P. What
rounding adds to G's small eigenvalues, which are the squares of X's singular values, grows from step to step: with
products in bf16 the iteration begins anew from P X after RESTART steps.

Note: symmetric products. X X^T and the products of polynomials of G are symmetric, so each is multiplied out in panels
of rows, from its diagonal block on (tx_muon_panel), and the rest is copied from the other side of the diagonal.
"""

import ctypes
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_ext.native import library, ops
from torch_ext.optim.muon.hyper import ITERATIONS

RESTART = {torch.float32: 0, torch.bfloat16: 3}
"""Steps of the Gram iteration after which it begins anew; 0: never."""

NON_FINITE = "the products of its Newton-Schulz iteration are not finite"

_TAME = 2.0**40  # norms up to it, and from its reciprocal on, are squared in fp32 without harm


class NonFiniteProducts(RuntimeError):
    """Of a matrix and a norm that are finite, which no legal iteration makes."""


class Iteration(NamedTuple):
    """How the matrices of a parameter are orthogonalised."""

    coefficients: tuple[float, float, float]
    steps: int
    eps: float  # norms are at least that
    kind: str  # of ITERATIONS


@functools.cache
def operations(rows: int, columns: int, steps: int, kind: str, dtype: torch.dtype) -> float:
    """Multiplications and additions of all products (tx_muon_operations)."""
    int64 = ctypes.c_int64
    count: Callable[..., float] = library.function(
        "tx_muon_operations", int64, int64, int64, ctypes.c_int32, int64, restype=ctypes.c_double, brief=True
    )
    return count(rows, columns, steps, ITERATIONS.index(kind), RESTART[dtype])


@functools.cache
def panel_of(n: int) -> int:
    """Rows of a panel of a symmetric product [n, n] (tx_muon_panel)."""
    panel: Callable[..., int] = library.function("tx_muon_panel", ctypes.c_int64, restype=ctypes.c_int64, brief=True)
    return panel(n)


def _panel_of(n: int, like: Tensor) -> int:
    """For memory beside `like`. On a GPU one panel: muon_mirror_ has no kernel there."""
    return panel_of(n) if like.is_cpu else n


def takes_gram(shape: torch.Size, iteration: Iteration, dtype: torch.dtype) -> bool:
    """Whether a matrix of this shape takes the Gram iteration: "auto" takes what has fewer operations."""
    if iteration.kind != "auto":
        return iteration.kind == "gram"
    rows, columns = shape
    gram, standard = (operations(rows, columns, iteration.steps, kind, dtype) for kind in ("gram", "standard"))
    return gram < standard


class _Square(NamedTuple):
    """A symmetric matrix and its panels: views, which are made once."""

    whole: Tensor
    rows: list[Tensor]
    columns: list[Tensor]  # from a panel's first row on
    upper: list[Tensor]  # a panel from its diagonal block on


def _square(memory: Tensor, n: int) -> _Square:
    whole, panel = memory[: n * n].view(n, n), _panel_of(n, memory)
    rows, columns = _row_panels(whole, panel), _column_panels(whole, panel)
    return _Square(whole, rows, columns, [whole[i : i + panel, i:] for i in range(0, n, panel)])


def _row_panels(a: Tensor, panel: int) -> list[Tensor]:
    return [a[i : i + panel] for i in range(0, len(a), panel)]


def _column_panels(b: Tensor, panel: int) -> list[Tensor]:
    return [b[:, i:] for i in range(0, b.shape[1], panel)]


class Workspace:
    """Memory of the square matrices, from one orthogonalisation to the next."""

    def __init__(self, largest: int, dtype: torch.dtype, device: torch.device) -> None:
        """largest: the most that the smaller dimension of a matrix is."""
        self._memory = [torch.empty(largest * largest, dtype=dtype, device=device) for _ in range(4)]
        self._squares: dict[int, list[_Square]] = {}

    def squares(self, n: int) -> list[_Square]:
        if n not in self._squares:
            self._squares[n] = [_square(memory, n) for memory in self._memory]
        return self._squares[n]


def orthogonalise(x: Tensor, other: Tensor, norm: float, iteration: Iteration, workspace: Workspace) -> Tensor:
    """x, which is overwritten, orthogonalised: in x or in `other`, whichever is returned.

    x, other: of one shape and dtype, contiguous. norm: x's, the root of the sum of squares. NonFiniteProducts
    where one is not finite.
    """
    if norm == 0.0:
        return x.zero_()
    scale = 1.0 / max(norm, iteration.eps)
    if not 1 / _TAME <= scale <= _TAME:
        x.mul_(scale)
        scale = 1.0
    squares = workspace.squares(min(x.shape))
    gram = takes_gram(x.shape, iteration, x.dtype)
    found, last = (_by_gram if gram else _by_matrix)(x, other, scale, iteration, squares)
    if not bool(torch.isfinite(last.sum(dtype=torch.float32))):
        raise NonFiniteProducts(NON_FINITE)
    return found


def _symmetric(
    rows: list[Tensor],
    columns: list[Tensor],
    out: _Square,
    beta: float = 0.0,
    added: _Square | None = None,
    alpha: float = 1.0,
) -> None:
    """out = beta added + alpha a b, of which it is known that it is symmetric, from panels of a and b."""
    for a, b, into, plus in zip(rows, columns, out.upper, (added or out).upper, strict=True):
        torch.addmm(plus, a, b, beta=beta, alpha=alpha, out=into)
    if len(rows) > 1:
        ops.call_unversioned("muon_mirror_", out.whole, len(rows[0]))


def _gram_of(x: Tensor, scale: float, out: _Square) -> None:
    """(scale x) (scale x)^T, or the other way round, whichever is smaller."""
    a, b = (x, x.T) if x.shape[0] <= x.shape[1] else (x.T, x)
    panel = _panel_of(len(a), x)
    _symmetric(_row_panels(a, panel), _column_panels(b, panel), out, alpha=scale * scale)


def _multiplied(x: Tensor, square: Tensor, out: Tensor, keep: float, scale: float) -> None:
    """out = keep x + scale square x, or x square where x has more rows: the square is symmetric."""
    a, b = (square, x) if x.shape[0] <= x.shape[1] else (x, square)
    torch.addmm(x if keep else out, a, b, beta=keep, alpha=scale, out=out)


def _by_matrix(x: Tensor, other: Tensor, scale: float, iteration: Iteration, squares: list[_Square]) -> Any:
    (a, b, c), (g, z) = iteration.coefficients, squares[:2]
    for _ in range(iteration.steps):
        _gram_of(x, scale, g)
        _symmetric(g.rows, g.columns, z, b, g, c)
        _multiplied(x, z.whole, other, a * scale, scale)
        x, other, scale = other, x, 1.0
    return x, z.whole


def _by_gram(x: Tensor, other: Tensor, scale: float, iteration: Iteration, squares: list[_Square]) -> Any:
    (a, b, c), (g, q, p, t) = iteration.coefficients, squares
    for steps in _rounds(iteration.steps, RESTART[x.dtype]):
        _gram_of(x, scale, g)
        for k in range(steps):
            _symmetric(g.rows, g.columns, q, b, g, c)
            q.whole.diagonal().add_(a)
            if k < steps - 1:
                _symmetric(g.rows, q.columns, t)
                _symmetric(t.rows, q.columns, g)
            if k == 0:
                p, q = q, p
            else:
                _symmetric(q.rows, p.columns, t)
                p, t = t, p
        _multiplied(x, p.whole, other, 0.0, scale)
        x, other, scale = other, x, 1.0
    return x, p.whole


def _rounds(steps: int, restart: int) -> list[int]:
    return [restart, steps - restart] if 0 < restart < steps else [steps]
