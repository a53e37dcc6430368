"""A parameter that Muon updates: its memory and its matrices."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_ext.optim.muon import hyper, newton_schulz
from torch_ext.optim.muon.matrix_forms import Matrix, MatrixForm, matrices
from torch_ext.optim.muon.sharing import Sharing
from torch_ext.optim.state.param_state import ParamState
from torch_ext.tensors import dense


class StepScalars(NamedTuple):
    """Arguments that are the same for all parameters of one step."""

    seed: int
    moment_rounding: int
    weight_rounding: int
    grad_scale: Tensor  # fp32, one element, or empty for none
    clip_coef: Tensor  # likewise
    external: int  # tx_external_write
    resynced: Tensor  # int64, one element: the number of resynced masters is added to it
    averaging: tuple[float, int]  # ema_decay, ema_every


class Piece(NamedTuple):
    """The part of one of a parameter's matrices that this rank has."""

    matrix: int  # index in the parameter's matrices
    begin: int  # [begin, end) of this rank's elements of the parameter
    end: int


def transfer_dtype_of(wire: torch.dtype | None, products: torch.dtype) -> torch.dtype:
    """Returns the dtype in which momentum is sent to its owner and the update is sent back. Both are rounded to it for
    every world size, one rank included, so that all have the same bits. wire: the gradients' dtype between ranks.
    products: the dtype of the matrix products."""
    return torch.bfloat16 if torch.bfloat16 in (wire, products) else torch.float32


class MatrixMember:
    """A parameter that Muon updates, or this rank's shard of it. Kept from step to step."""

    def __init__(
        self,
        state: ParamState,
        group: dict[str, Any],
        form: MatrixForm,
        wire: torch.dtype | None,
        sharing: Sharing | None,
    ) -> None:
        """group: the parameter's group in the optimizer. wire: the gradients' dtype between ranks. sharing: see
        `sharing_of`."""
        self.state, self.group, self.sharing, self._wire = state, group, sharing, wire
        self.weight = dense.flat(state.weight.detach()).view(-1)
        self.matrices: list[Matrix] = matrices(state.param.shape, form)
        offset, n = state.local.offset, self.weight.numel()
        runs = ((m.begin - offset, m.begin - offset + m.numel) for m in self.matrices)
        clipped = ((i, max(begin, 0), min(end, n)) for i, (begin, end) in enumerate(runs))
        self.pieces = [Piece(i, begin, end) for i, begin, end in clipped if begin < end]
        self.meta = state.id, offset, 0

    @property
    def name(self) -> str:
        return self.state.name

    @property
    def device(self) -> torch.device:
        return self.weight.device

    @property
    def largest(self) -> Matrix:
        return max(self.matrices, key=lambda m: m.numel)

    @property
    def widest(self) -> int:
        """The largest of its matrices' smaller dimensions."""
        return max(min(m.rows, m.columns) for m in self.matrices)

    @property
    def ns_dtype(self) -> torch.dtype:
        """The dtype of the matrix products."""
        return hyper.NS_DTYPES[self.group["ns_dtype"]]

    @property
    def transfer_dtype(self) -> torch.dtype:
        """See `transfer_dtype_of`."""
        return transfer_dtype_of(self._wire, self.ns_dtype)

    def iteration(self) -> newton_schulz.Iteration:
        group = self.group
        a, b, c = map(float, group["ns_coefficients"])
        return newton_schulz.Iteration((a, b, c), int(group["ns_steps"]), float(group["eps"]), group["ns"])

    def operations(self) -> list[float]:
        """Returns the number of operations for each matrix (`newton_schulz.operations`)."""
        iteration, dtype = self.iteration(), self.ns_dtype
        return [
            newton_schulz.operations(m.rows, m.columns, iteration.steps, iteration.kind, dtype) for m in self.matrices
        ]

    def stored(self, key: str | None) -> Tensor | None:
        """Returns a stored state, flat, for the operators; None if there is no such state."""
        value = self.state.state.get(key) if key else None
        return None if value is None else dense.flat(value).view(-1)

    def step_outputs(self) -> list[Tensor | None]:
        """Returns `ParamState.step_outputs`, flat."""
        return [None if one is None else dense.flat(one).view(-1) for one in self.state.step_outputs()]


class Part(NamedTuple):
    """A matrix to orthogonalise."""

    member: MatrixMember
    matrix: Matrix
    momentum: Tensor  # flat, in the transfer dtype; overwritten by the update
