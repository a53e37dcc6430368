"""What ranks tell each other at the end of a backward under FSDP2, so that an error is the same on every rank."""

from collections.abc import Sequence

import torch

from torch_ext.grads.errors import MISSING, READY, names_of, refuse_frozen, refuse_nonfinite
from torch_ext.grads.stats import ALL_FINITE
from torch_ext.parallel.fsdp.reduce_scatter import UnitPlan

_CALL = 1 << 48  # a unit's word: reductions above, elements below


class FSDPCycleReport:
    """This rank's, of one backward."""

    def __init__(self, n_params: int, n_units: int) -> None:
        self.nonfinite = ALL_FINITE
        """The position of a parameter whose gradient is not finite."""
        self.grad_states = bytearray(n_params)
        self._units = [0] * n_units

    def reduced(self, unit: UnitPlan, numel: int) -> None:
        self._units[unit.number] += _CALL + numel

    def encode(self, cycle: int) -> torch.Tensor:
        """uint8; of as many bytes on every rank."""
        words = torch.tensor([cycle, self.nonfinite, *self._units], dtype=torch.int64)
        return torch.cat([words.view(torch.uint8), torch.frombuffer(self.grad_states, dtype=torch.uint8)])


class FSDPCycleReports:
    """Every rank's."""

    def __init__(self, rows: Sequence[torch.Tensor], names: Sequence[str], units: Sequence[UnitPlan]) -> None:
        self._names, self._units = names, units
        words = 8 * (2 + len(units))
        self._words: list[list[int]] = [row[:words].view(torch.int64).tolist() for row in rows]
        self._grad_states = [row[words:] for row in rows]
        self.nonfinite = [row[1] for row in self._words]

    def check_places(self, rank: int) -> None:
        """RuntimeError where the ranks did not reduce the same gradients: one would wait for ever."""
        cycles = [row[0] for row in self._words]
        for other, cycle in enumerate(cycles):
            if cycle != cycles[rank]:
                raise RuntimeError(f"rank {other} is in gradient cycle {cycle} and rank {rank} in {cycles[rank]}")
        for unit in self._units:
            counts = [row[2 + unit.number] for row in self._words]
            if len(set(counts)) > 1:
                said = ", ".join(
                    f"rank {other} {count % _CALL} elements in {count // _CALL} reductions"
                    for other, count in enumerate(counts)
                )
                raise RuntimeError(
                    f"the ranks reduced different gradients of {unit} ({said}): a parameter was used on "
                    "some ranks only. With torch >= 2.13, parallelize(..., find_unused_parameters=True) lets such "
                    "parameters count as zero; this process group cannot be used any more"
                )

    def check_trained(self) -> None:
        """RuntimeError where a parameter is frozen on some ranks only: these reduce other gradients."""
        refuse_frozen(self._names, self._grad_states)

    def check_finite(self) -> None:
        refuse_nonfinite(self._names, self.nonfinite)

    def missing_everywhere(self) -> list[int]:
        """Parameters without a gradient on every rank."""
        return torch.stack(self._grad_states).ne(READY).all(0).nonzero().flatten().tolist()

    def check_none_missing(self) -> None:
        missing = sorted({i for states in self._grad_states for i in states.eq(MISSING).nonzero().flatten().tolist()})
        if missing:
            raise RuntimeError(
                f"no gradient is ready for {names_of(self._names, missing)}. The loss does not depend on the "
                "parameter, or it was replaced after parallelize. If parameters may be unused, call parallelize(..., "
                "find_unused_parameters=True). Call zero_grad() before going on."
            )
