"""Which rank orthogonalises which matrix.

Note: owners. Ranks that share matrices, the same ones or parts of them, would make the same products. Each matrix has
one owner instead, to which its momentum comes where it is cut, and which sends its update, rounded to the dtype of the
wire. The plan is made in C from the shapes alone (tx_plan_owners), balanced by operations, and compared once.
"""

import ctypes
from collections.abc import Sequence

import torch

from torch_ext.comm import group_calls
from torch_ext.native import library

_CALL = "step(): which rank orthogonalises which matrix"


class Owners:
    """Of the matrices of one process group, by their numbers, in the order in which they are stepped."""

    def __init__(self, sizes: Sequence[float], group: torch.distributed.ProcessGroup) -> None:
        """sizes: operations of each matrix. Collective: RuntimeError on every rank where the plans differ."""
        self.group, self.rank = group, group.rank()
        n, ranks = len(sizes), group.size()
        owners, fingerprint = (ctypes.c_int32 * max(n, 1))(), ctypes.c_int64()
        int64, pointer = ctypes.c_int64, ctypes.c_void_p
        room_of = library.function("tx_plan_owners_bytes", int64, int64, restype=int64, brief=True)
        room = (ctypes.c_int64 * -(-room_of(n, ranks) // 8))()
        plan = library.function("tx_plan_owners", int64, pointer, int64, pointer, pointer, pointer)
        plan(n, (ctypes.c_double * max(n, 1))(*sizes), ranks, room, owners, ctypes.byref(fingerprint))
        self.of = list(owners)[:n]
        """The rank in the group, by matrix."""
        self._refuse_differing(fingerprint.value)

    def _refuse_differing(self, fingerprint: int) -> None:
        mine = torch.tensor([fingerprint, len(self.of)])
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


def agreed_smallest(number: int, group: torch.distributed.ProcessGroup, what: str) -> int:
    """The smallest of the ranks' numbers. Collective."""
    least = torch.tensor([number])
    group_calls.all_reduce(least, group, f"step(): {what}", torch.distributed.ReduceOp.MIN)
    return int(least)
