"""The optimizer state of one parameter: its two forms, and their tensors.

stored (`opt.state[p]`), as the operators read and write it    logical (`state_dict()`), as checkpoints hold it
  step              fp32, one element                            step
  exp_avg           policy dtype, shape of p                     exp_avg       fp32 where block-scaled, else as stored
  exp_avg_sq        policy dtype, shape of p; its square root    exp_avg_sq    likewise
                    where it is block-scaled
  momentum_buffer   exp_avg's dtype, shape of p; of Muon's       momentum_buffer  likewise
                    matrices, in place of both moments
  scales            uint8, where a moment is block-scaled (fp16, uint8): a byte for each block of 128 elements of
                    exp_avg, then of exp_avg_sq
  master_param      fp32, shape of p                             master_param  fp32
  master_remainder  int16, shape of p                            master_param  fp32, exactly (weight, remainder)
  ema_param         bf16 or fp32, shape of p: the average        ema_param     as stored
  ema_upper         bf16, shape of p: the upper 16 of 24 bits    ema_param     fp32
  ema_lower         uint8, shape of p: the 8 bits that follow
  checksum          int64, with a master only: checksums of the weights, which show whether they were modified outside
                    the optimizer
A parameter has at most one kind of master and one kind of average. Decoding (stored to logical) and encoding again
gives the same bytes.
"""

import ctypes
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from torch_ext.native import constants, dtypes, library
from torch_ext.policy.policy import Policy

# The format of each moment if it is block-scaled.
FORMATS = {
    "exp_avg": constants.FORMAT_SIGNED,
    "exp_avg_sq": constants.FORMAT_SQRT,
    "momentum_buffer": constants.FORMAT_MOMENTUM,
}
MASTERS = {"master_param": torch.float32, "master_remainder": torch.int16}  # as stored
EMA, EMA_PLANES = "ema_param", {"ema_upper": torch.bfloat16, "ema_lower": torch.uint8}
LOGICAL = ("step", *FORMATS, "master_param", EMA)
_CHECKSUMED = {"master_param": constants.SAMPLED, "master_remainder": constants.CHECKSUM}  # weights per checksum
GRAIN = _CHECKSUMED["master_remainder"]
"""Number of elements that are encoded together: slices of a stored state begin at a multiple of it."""


class StateDtypes(NamedTuple):
    """The tensors of a parameter's stored state, and their dtypes."""

    exp_avg: torch.dtype
    exp_avg_sq: torch.dtype | None  # None: a matrix of Muon's; the dtype of its momentum_buffer is `exp_avg`
    master: str | None  # the key of its master: "master_param" or "master_remainder"; None: it has none
    ema: "torch.dtype | str | None" = None  # the dtype of the average; "24bit": two planes; None: no average

    @classmethod
    def of(
        cls, policy: Policy, dtype: torch.dtype, numel: int, keep_32bit: bool, matrix: bool = False
    ) -> "StateDtypes":
        """Returns the state dtypes of a parameter in `dtype` with `numel` elements on all ranks together. keep_32bit:
        its moments are fp32, whatever the policy says. matrix: Muon steps it. Raises ValueError for settings that the
        optimizer rejects."""
        row = policy.row(dtype)
        if row.main_params_dtype not in (None, torch.float32):
            raise ValueError(
                f"main_params_dtype is {row.main_params_dtype}: a master must have more bits than the weight; "
                "torch.float32 (or None, for no master) is legal"
            )
        master = None
        if dtype != torch.float32 and row.main_params_dtype is not None:
            remainder = row.store_param_remainders and dtype == torch.bfloat16
            master = "master_remainder" if remainder else "master_param"
        exp_avg, exp_avg_sq = _moments(row, numel, keep_32bit)
        return cls(exp_avg, None if matrix else exp_avg_sq, master)

    @property
    def matrix(self) -> bool:
        """Whether Muon steps the parameter."""
        return self.exp_avg_sq is None

    @property
    def moments(self) -> dict[str, torch.dtype]:
        """The dtype of each moment, by key."""
        if self.exp_avg_sq is None:
            return {"momentum_buffer": self.exp_avg}
        return {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}

    @property
    def first(self) -> str:
        """The key of the first moment, which every state has once it is created."""
        return "exp_avg" if self.exp_avg_sq is not None else "momentum_buffer"

    @property
    def scaled(self) -> list[str]:
        """The keys of the moments that are block-scaled."""
        return [key for key, dtype in self.moments.items() if dtype in (torch.float16, torch.uint8)]

    def with_average(self, ema: "torch.dtype | str | None", dtype: torch.dtype, name: str) -> "StateDtypes":
        """Returns these dtypes with an average in `ema`, for a parameter in `dtype`. ValueError where the parameter has
        neither a master nor fp32 weights to average."""
        if ema is not None and self.master is None and dtype != torch.float32:
            raise ValueError(
                f"ema_decay: {name} is in {dtype} without a master, and an average needs more than 16 bits of each "
                "weight: leave main_params_dtype at its default (a master), train in float32, or leave ema_decay out"
            )
        return self._replace(ema=ema)

    @property
    def scale_rows(self) -> int:
        """The number of block-scaled moments, each of which has a row in `scales`."""
        return len(self.scaled)

    def shaped(self) -> dict[str, torch.dtype]:
        """Returns the stored tensors that have the parameter's shape, with their dtypes."""
        return self.moments | ({self.master: MASTERS[self.master]} if self.master else {}) | self._averages()

    def _averages(self) -> dict[str, torch.dtype]:
        if self.ema is None:
            return {}
        return {EMA: self.ema} if isinstance(self.ema, torch.dtype) else EMA_PLANES

    def blockwise(self, numel: int) -> dict[str, tuple[int, torch.dtype]]:
        """Returns the stored tensors that have an element for each block of the parameter's `numel` elements (scales,
        checksum): their number of elements, and their dtype."""
        found = {}
        if self.scale_rows:
            found["scales"] = self.scale_rows * -(-numel // constants.BLOCK), torch.uint8
        if self.master:
            found["checksum"] = -(-numel // _CHECKSUMED[self.master]), torch.int64
        return found

    def logical(self) -> dict[str, bool]:
        """Returns the keys of the logical state, without the step, and whether each is stored in another form."""
        scaled = self.scaled
        found = {moment: moment in scaled for moment in self.moments}
        found |= {"master_param": self.master != "master_param"} if self.master else {}
        return found | ({} if self.ema is None else {EMA: not isinstance(self.ema, torch.dtype)})

    def complete(self, state: Mapping[str, Any]) -> bool:
        """Whether a stored state has all its tensors (the step is not looked at)."""
        return all(key in state for key in (*self.shaped(), *self.blockwise(0)))

    def nbytes(self, numel: int) -> int:
        """Returns the bytes of the stored state of a parameter of `numel` elements, without the step."""
        blockwise = sum(count * dtype.itemsize for count, dtype in self.blockwise(numel).values())
        return blockwise + numel * sum(dtype.itemsize for dtype in self.shaped().values())


def first_moment(state: Mapping[str, Any]) -> Any:
    """Returns the first moment of a stored state; None if the state has the step only."""
    moment = state.get("exp_avg")
    return state.get("momentum_buffer") if moment is None else moment


def _moments(row: Policy, numel: int, keep_32bit: bool) -> tuple[torch.dtype, torch.dtype]:
    """Returns the dtypes of exp_avg and exp_avg_sq: the row's, or, with keep_32bit or min_8bit_size, as
    tx_policy_moments says."""
    if not keep_32bit and not row.min_8bit_size:
        return row.exp_avg_dtype, row.exp_avg_sq_dtype
    found = ctypes.c_int32(), ctypes.c_int32()
    moments = library.function(
        "tx_policy_moments", ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p
    )
    moments(ctypes.byref(row._as_c()[0]), numel, int(keep_32bit), *map(ctypes.byref, found))
    exp_avg, exp_avg_sq = (dtypes.dtype_of(code.value) for code in found)
    assert exp_avg is not None and exp_avg_sq is not None
    return exp_avg, exp_avg_sq
