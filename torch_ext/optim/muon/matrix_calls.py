"""The two operators that read and write the memory of Muon's parameters, momentum and update, each for several
parameters in one call."""

import contextlib
import ctypes
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from torch_ext.native import library, ops
from torch_ext.optim.muon.matrix_member import MatrixMember, StepScalars
from torch_ext.optim.state.param_state import named


class MatrixCall:
    """Parameters of one group, with the same states, that one call of an operator steps."""

    def __init__(self, members: list[MatrixMember]) -> None:
        self.members, self._group = members, members[0].group
        self._meta = torch.tensor([m.meta for m in members], dtype=torch.int64, device="cpu")

    def momentum(self, grads: list[Tensor], scalars: StepScalars, into: list[Tensor]) -> None:
        """Updates the momentum of each parameter. Writes this rank's elements of the matrices to orthogonalise to
        `into`. Raises RuntimeError, naming the parameter, before anything is written."""
        with self.named():
            ops.call_unversioned(
                "muon_momentum_",
                *(grads, self._stored("momentum_buffer"), self._stored("scales"), into, self._steps(), self._meta),
                *(scalars.grad_scale, scalars.clip_coef, float(self._group["momentum"]), bool(self._group["nesterov"])),
                *(scalars.seed, scalars.moment_rounding),
            )

    def update(self, updates: list[Tensor], scalars: StepScalars) -> None:
        """Updates weights and masters, and increments the step counts. Raises as `momentum` does."""
        members = self.members
        outputs = zip(*(m.step_outputs() for m in members), strict=True)
        with self.named():
            ops.call_unversioned(
                "muon_update_",
                *([m.weight for m in members], updates, self._stored(members[0].state.kinds.master)),
                *(self._stored("checksum"), self._steps(), self._meta, self._parts(), self._rates(), scalars.resynced),
                *([flat for flat in column if flat is not None] for column in outputs),
                *(scalars.seed, scalars.weight_rounding, scalars.external, *scalars.averaging),
            )

    def _stored(self, key: str | None) -> list[Tensor]:
        """Returns a stored state of each parameter; an empty list if they have no such state."""
        found = [m.stored(key) for m in self.members]
        return [flat for flat in found if flat is not None]

    def _steps(self) -> list[Tensor]:
        return [m.state.state["step"] for m in self.members]

    def _parts(self) -> Tensor:
        """Returns one row (tx_muon_part) per piece: the parameter's index and its first element."""
        rows = [(i, piece.begin) for i, m in enumerate(self.members) for piece in m.pieces]
        return torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(-1, 2)

    def _rates(self) -> Tensor:
        """Returns one row (tx_muon_rate) per piece: the factors of the update and of weight decay."""
        lr, decay = float(self._group["lr"]), float(self._group["weight_decay"])
        match = int(self._group["adjust_lr_fn"] == "match_rms_adamw")
        ratio_of = library.function(
            "tx_muon_lr_ratio", ctypes.c_int64, ctypes.c_int64, ctypes.c_int32, restype=ctypes.c_double, keep_gil=True
        )
        of_pieces = [m.matrices[piece.matrix] for m in self.members for piece in m.pieces]
        rows = [(lr * ratio_of(one.rows, one.columns, match), lr * decay) for one in of_pieces]
        return torch.tensor(rows, dtype=torch.float64, device="cpu").reshape(-1, 2)

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Context in which a RuntimeError gets the parameter's name."""
        try:
            yield
        except RuntimeError as refusal:
            names = [m.name for m in self.members]
            text = named(str(refusal).replace("grads[", "params["), names)
            if len(names) == 1:
                raise RuntimeError(f"{names[0]}: {text}; its weights are as they were") from None
            others = f"{len(names) - 1} others" if len(names) > 2 else names[1]
            raise RuntimeError(f"{names[0]} and {others}: {text}; their weights are as they were") from None


def calls_of(members: Iterable[MatrixMember]) -> list[MatrixCall]:
    """Returns calls that step all of these parameters once."""
    alike: dict[object, list[MatrixMember]] = {}
    for m in members:
        outputs = tuple(one is not None for one in m.state.step_outputs())
        key = m.state.group, m.state.kinds, m.weight.dtype, m.transfer_dtype, outputs
        alike.setdefault(key, []).append(m)
    return [MatrixCall(chosen) for chosen in alike.values()]
