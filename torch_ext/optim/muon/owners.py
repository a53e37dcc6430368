"""Which rank orthogonalises which matrix.

Note: owners. Ranks that share matrices, the same ones or parts of them, would make the same products. Each matrix has
one owner instead, to which its momentum comes where it is cut, and which sends its update, rounded to the dtype of the
wire. The plan is made in C from the shapes alone (tx_plan_owners), balanced by operations, and compared once.
"""

import ctypes
from collections.abc import Sequence

import torch

from torch_ext.comm import group_calls
from torch_ext.native import dtypes as native_dtypes
from torch_ext.native import library, structs
from torch_ext.optim.muon.matrix_forms import Matrix

_CALL = "step(): which rank orthogonalises which matrix"


@structs.mirror("tx_muon_matrix")
class CMatrix(library.Struct):
    """One of the matrices that ranks share."""

    @classmethod
    def of(cls, param: int, m: Matrix, travels: torch.dtype, products: torch.dtype, owner: int = 0) -> "CMatrix":
        """param: the number of its parameter. travels: see `MatrixMember`. products: in which it is multiplied."""
        dtypes = map(native_dtypes.code_of, (travels, products))
        return cls(param, m.begin, m.rows, m.columns, owner, *dtypes)


def planned(sizes: Sequence[float], ranks: int) -> tuple[list[int], int]:
    """The owner of each matrix, and the plan's fingerprint. sizes: operations."""
    n, int64, pointer = len(sizes), ctypes.c_int64, ctypes.c_void_p
    owners, fingerprint = (ctypes.c_int32 * max(n, 1))(), int64()
    room_of = library.function("tx_plan_owners_bytes", int64, int64, restype=int64, brief=True)
    room = (int64 * -(-room_of(n, ranks) // 8))()
    plan = library.function("tx_plan_owners", int64, pointer, int64, pointer, pointer, pointer)
    plan(n, (ctypes.c_double * max(n, 1))(*sizes), ranks, room, owners, ctypes.byref(fingerprint))
    return list(owners)[:n], fingerprint.value


class Owners:
    """Of the matrices of one process group, by their numbers, in the order in which they are stepped."""

    def __init__(
        self,
        sizes: Sequence[float],
        matrices: Sequence[CMatrix],
        ids: Sequence[int],
        group: torch.distributed.ProcessGroup,
        device: torch.device,
    ) -> None:
        """Of each matrix: its operations, what it is, and its parameter's id. device: of what the group sends.
        Collective: RuntimeError on every rank where they differ."""
        self.group, self.rank, self._device = group, group.rank(), device
        self.of, plan = planned(sizes, group.size())
        """The rank in the group, by matrix."""
        n, int64, pointer = len(matrices), ctypes.c_int64, ctypes.c_void_p
        fingerprint = library.function("tx_muon_fingerprint", int64, int64, pointer, pointer, restype=int64, brief=True)
        self._refuse_differing(
            fingerprint(plan, n, (CMatrix * max(n, 1))(*matrices), (int64 * max(n, 1))(*map(_signed, ids)))
        )

    def _refuse_differing(self, fingerprint: int) -> None:
        mine = torch.tensor([fingerprint, len(self.of)], device=self._device)
        rows = [torch.empty_like(mine) for _ in range(self.group.size())]
        group_calls.all_gather(rows, mine, self.group, _CALL).wait()
        ranks = torch.distributed.get_process_group_ranks(self.group)
        for rank, row in zip(ranks, rows, strict=True):
            if not torch.equal(row, rows[0]):
                raise RuntimeError(
                    f"{_CALL}: the plans differ: rank {ranks[0]} has {int(rows[0][1])} matrices, and rank {rank} "
                    f"{int(row[1])}, or others. Shapes, split, adamw_params, ns, ns_dtype, ns_steps and which "
                    "parameters have a gradient must be the same on all ranks"
                )


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


def agreed_smallest(number: int, group: torch.distributed.ProcessGroup, what: str, device: torch.device) -> int:
    """The smallest of the ranks' numbers. device: of what the group sends. Collective."""
    least = torch.tensor([number], device=device)
    group_calls.all_reduce(least, group, f"step(): {what}", torch.distributed.ReduceOp.MIN)
    return int(least)
