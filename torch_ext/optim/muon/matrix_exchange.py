"""The order in which sharded matrices are exchanged and updated: a binding of csrc/core/muon_exchange.c, which decides
the order and plans the memory."""

import ctypes
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

from torch_ext.native import library, structs
from torch_ext.optim.muon.matrix_forms import Matrix
from torch_ext.optim.muon.matrix_member import MatrixMember
from torch_ext.optim.muon.owners import CMatrix, Owners


@structs.mirror("tx_muon_run")
class _Run(library.Struct):
    """tx_muon_run: a range of elements of a parameter."""


@structs.mirror("tx_muon_exchange_args")
class _Args(library.Struct):
    """tx_muon_exchange_args: the matrices, and which rank has which elements."""


@structs.mirror("tx_muon_action")
class Action(library.Struct):
    """tx_muon_action: what to do (`kind`, one of Do), for which parameter or in which round."""


class Do(IntEnum):
    """tx_muon_do: the kinds of actions."""

    MOMENTUM = 1
    GATHER = 2
    RECEIVE = 3
    MULTIPLY = 4
    SCATTER = 5
    INSTALL = 6
    UPDATE = 7
    DISCARD = 8


class ShardedMatrix(NamedTuple):
    """One of a parameter's matrices, and the part of it that this rank has."""

    member: MatrixMember
    matrix: Matrix
    own: slice  # of this rank's elements of the parameter; empty if this rank has no part of the matrix


class Exchange:
    """The exchange of the matrices that are sharded over one process group. Kept from step to step."""

    def __init__(self, members: Sequence[MatrixMember], owner_of: Sequence[Sequence[int]], owners: Owners) -> None:
        """members: the parameters in the order of their updates. owner_of: for each parameter, the owner of each of its
        matrices."""
        self.members, self.owners, self._world = list(members), owners, owners.group.size()
        self._matrices = [matrix for m in members for matrix in _sharded(m)]
        rows = [
            CMatrix.of(param, m, member.transfer_dtype, member.ns_dtype, owner)
            for param, (member, of) in enumerate(zip(members, owner_of, strict=True))
            for m, owner in zip(member.matrices, of, strict=True)
        ]
        runs = [run for m in members if m.sharing is not None for run in m.sharing.runs or ()]
        self._args = _Args(
            size=ctypes.sizeof(_Args),
            n=len(rows),
            matrices=(CMatrix * max(1, len(rows)))(*rows),
            n_params=len(members),
            runs=(_Run * max(1, len(runs)))(*(_Run(*run) for run in runs)),
            world=self._world,
            rank=owners.rank,
        )
        bytes_of = library.function("tx_muon_exchange_bytes", ctypes.c_void_p, restype=ctypes.c_int64, keep_gil=True)
        self._memory = (ctypes.c_int64 * (bytes_of(ctypes.byref(self._args)) // 8))()
        self._machine = ctypes.c_void_p()
        self._reasons: dict[int, str] = {}  # index of a matrix that failed -> why

    def actions(self) -> Iterator[Action]:
        """Yields the actions of one step in their order. Each must be done before the next one is asked for."""
        pointer = ctypes.c_void_p
        init = library.function("tx_muon_exchange_init", pointer, pointer, pointer)
        follow = library.function("tx_muon_exchange_next", pointer, pointer, restype=ctypes.c_int32, keep_gil=True)
        init(self._memory, ctypes.byref(self._args), ctypes.byref(self._machine))
        self._reasons.clear()
        action = Action()
        while follow(self._machine, ctypes.byref(action)):
            yield action

    def matrix(self, in_round: int, rank: int) -> ShardedMatrix | None:
        """Returns the matrix that a rank orthogonalises in a round; None: it has none."""
        number = self._matrix_index(in_round, rank)
        return None if number < 0 else self._matrices[number]

    def matrices_of_round(self, in_round: int) -> list[ShardedMatrix | None]:
        """Returns the matrix that each rank orthogonalises in a round."""
        return [self.matrix(in_round, rank) for rank in range(self._world)]

    def own(self, in_round: int) -> ShardedMatrix | None:
        return self.matrix(in_round, self.owners.rank)

    def sizes(self, in_round: int) -> tuple[list[int], list[int]]:
        """Returns the bytes of this rank's matrix that each rank sends here, and the bytes of each rank's matrix that
        this rank sends there."""
        int64 = ctypes.c_int64
        receive_bytes, send_bytes = (int64 * self._world)(), (int64 * self._world)()
        found = library.function(
            "tx_muon_exchange_sizes",
            *(ctypes.c_void_p, int64, ctypes.c_void_p, ctypes.c_void_p),
            restype=None,
            keep_gil=True,
        )
        found(self._machine, in_round, receive_bytes, send_bytes)
        return list(receive_bytes), list(send_bytes)

    def fail(self, in_round: int, rank: int, reason: str) -> None:
        """Reports that the products of a rank's matrix in this round failed. Every rank reports the same failures."""
        call = library.function("tx_muon_exchange_fail", ctypes.c_void_p, ctypes.c_int64, restype=None, keep_gil=True)
        matrix = self._matrix_index(in_round, rank)
        self._reasons[matrix] = reason
        call(self._machine, matrix)

    def failed(self) -> tuple[ShardedMatrix, str] | None:
        """Returns the first matrix that failed, and why: the same on all ranks once the step is done. None: none
        failed."""
        first = library.function("tx_muon_exchange_failed", ctypes.c_void_p, restype=ctypes.c_int64, keep_gil=True)(
            self._machine
        )
        return None if first < 0 else (self._matrices[first], self._reasons[first])

    def _matrix_index(self, in_round: int, rank: int) -> int:
        int64 = ctypes.c_int64
        found = library.function(
            "tx_muon_exchange_matrix", ctypes.c_void_p, int64, int64, restype=int64, keep_gil=True
        )(self._machine, in_round, rank)
        return int(found)


def _sharded(member: MatrixMember) -> list[ShardedMatrix]:
    own = {piece.matrix: slice(piece.begin, piece.end) for piece in member.pieces}
    return [ShardedMatrix(member, m, own.get(i, slice(0, 0))) for i, m in enumerate(member.matrices)]
