"""Decides which rank orthogonalises which matrix.

Note: owners. Ranks that have the same matrices, or parts of them, would all compute the same products. Instead each
matrix has one owner. The owner receives the parts of the momentum if the matrix is sharded, and sends the update,
rounded to the transfer dtype. C assigns owners from the shapes alone (tx_plan_owners), balanced by operations; ranks
compare the assignment once.
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
    """tx_muon_matrix: a matrix that ranks share."""

    @classmethod
    def of(
        cls, param: int, m: Matrix, transfer_dtype: torch.dtype, product_dtype: torch.dtype, owner: int = 0
    ) -> "CMatrix":
        """param: index of its parameter. transfer_dtype: see `MatrixMember`. product_dtype: of its matrix products."""
        dtypes = map(native_dtypes.code_of, (transfer_dtype, product_dtype))
        return cls(param, m.begin, m.rows, m.columns, owner, *dtypes)


def planned(sizes: Sequence[float], ranks: int) -> tuple[list[int], int]:
    """Returns the owner of each matrix, and the fingerprint of this assignment. sizes: operations of each matrix."""
    n, int64, pointer = len(sizes), ctypes.c_int64, ctypes.c_void_p
    owners, fingerprint = (ctypes.c_int32 * max(n, 1))(), int64()
    bytes_of = library.function("tx_plan_owners_bytes", int64, int64, restype=int64, keep_gil=True)
    workspace = (int64 * -(-bytes_of(n, ranks) // 8))()
    plan = library.function("tx_plan_owners", int64, pointer, int64, pointer, pointer, pointer)
    plan(n, (ctypes.c_double * max(n, 1))(*sizes), ranks, workspace, owners, ctypes.byref(fingerprint))
    return list(owners)[:n], fingerprint.value


class Owners:
    """The owners of the matrices that one process group shares, in the order in which matrices are updated."""

    def __init__(
        self,
        sizes: Sequence[float],
        matrices: Sequence[CMatrix],
        ids: Sequence[int],
        group: torch.distributed.ProcessGroup,
        device: torch.device,
    ) -> None:
        """sizes, matrices, ids: operations, struct and parameter's id of each matrix. device: of the tensors that the
        group sends. Collective: raises RuntimeError on every rank if the ranks' matrices differ."""
        self.group, self.rank, self._device = group, group.rank(), device
        self.of, plan = planned(sizes, group.size())
        """Matrix -> its owner's rank in the group."""
        n, int64, pointer = len(matrices), ctypes.c_int64, ctypes.c_void_p
        fingerprint = library.function(
            "tx_muon_fingerprint", int64, int64, pointer, pointer, restype=int64, keep_gil=True
        )
        self._refuse_differing(
            fingerprint(plan, n, (CMatrix * max(n, 1))(*matrices), (int64 * max(n, 1))(*map(_signed, ids)))
        )

    def _refuse_differing(self, fingerprint: int) -> None:
        """Raises RuntimeError, on every rank, if the ranks' fingerprints differ. Collective."""
        mine = torch.tensor([fingerprint, len(self.of)], device=self._device)
        rows = [torch.empty_like(mine) for _ in range(self.group.size())]
        group_calls.all_gather(rows, mine, self.group, _CALL).wait()
        ranks = torch.distributed.get_process_group_ranks(self.group)
        for rank, row in zip(ranks, rows, strict=True):
            if not torch.equal(row, rows[0]):
                raise RuntimeError(
                    f"{_CALL}: the ranks' plans differ: rank {ranks[0]} has {int(rows[0][1])} matrices and rank "
                    f"{rank} has {int(row[1])}, or their matrices differ. Shapes, split, adamw_params, ns, ns_dtype, "
                    "ns_steps and which parameters have a gradient must be the same on all ranks"
                )


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


def agreed_smallest(number: int, group: torch.distributed.ProcessGroup, what: str, device: torch.device) -> int:
    """Returns the smallest of the ranks' numbers. Collective. device: of the tensors that the group sends."""
    least = torch.tensor([number], device=device)
    group_calls.all_reduce(least, group, f"step(): {what}", torch.distributed.ReduceOp.MIN)
    return int(least)
