"""How the parameters that are stepped on the host are cut into batches, each stepped by one call of the operator.

Small parameters share a batch and large ones are cut, so that a batch is a few megabytes: copies of one batch run beside
the step of another, and what was just copied is still in the cache when it is stepped.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from torch_ext import _state, _tensors

if TYPE_CHECKING:
    from torch_ext._plan import Gather, Member

# Elements: a piece begins at a multiple of it, and has more, or as a whole parameter with a sampled witness its witness
# would be of all of its weights.
_GRAIN = _state.WITNESSED["master_param"]


class Piece(NamedTuple):
    """Elements [begin, begin + numel) of a member's weight, in memory order."""

    member: int
    begin: int  # a multiple of _GRAIN
    numel: int
    part: int | None
    """Which of the member's pieces; None: it is the whole member."""

    @property
    def whole(self) -> bool:
        return self.part is None


class Batch(NamedTuple):
    pieces: list[Piece]
    gather: "Gather"
    """The bucket that is gathered after it; None: none is."""


def cut(
    members: "Sequence[Member]",
    gathers: "Sequence[Gather]",
    order: "Sequence[Gather]",
    batch_of: Callable[[int], int],
) -> list[Batch]:
    """Batches bucket by bucket in that order. gathers: of each member. batch_of: about how many elements a batch of a
    bucket has that has so many.

    What is in a batch has the same kind of master, since its weights are brought down, or not, together. A weight that
    is not dense is never cut.
    """
    batches: list[Batch] = []
    totals: Counter[Gather] = Counter()
    for member, gather in zip(members, gathers, strict=True):
        totals[gather] += member.weight.numel()
    of: dict[tuple[Gather, str | None], list[int]] = {}
    for i, (member, gather) in enumerate(zip(members, gathers, strict=True)):
        of.setdefault((gather, member.kinds.master), []).append(i)
    for (gather, _), chosen in sorted(of.items(), key=lambda item: order.index(item[0][0])):
        numel, room = batch_of(totals[gather]), 0
        for i in chosen:
            weight = members[i].weight
            for piece in _pieces(i, weight.numel(), numel if _tensors.is_dense(weight) else weight.numel()):
                if room < max(piece.numel, 1):
                    batches.append(Batch([], gather))
                    room = max(numel, piece.numel)
                batches[-1].pieces.append(piece)
                room -= piece.numel
    return batches


def _pieces(i: int, numel: int, most: int) -> list[Piece]:
    """Of about `most` elements each, and a last one of the rest."""
    size = -(-most // _GRAIN) * _GRAIN
    if numel <= most:
        return [Piece(i, 0, numel, None)]
    begins = list(range(0, numel, size))
    if numel - begins[-1] <= _GRAIN:
        begins.pop()
    return [Piece(i, begin, end - begin, part) for part, (begin, end) in enumerate(pairwise([*begins, numel]))]


class SplitScales:
    """The scales of a part of a parameter with two scaled moments, which lie apart: brought together for the step."""

    def __init__(self, there: Tensor) -> None:
        """there: a row for each moment, as in `_state.part`."""
        self.there = there
        self.here = torch.empty_like(there, memory_format=torch.contiguous_format)

    def load(self) -> None:
        self.here.copy_(self.there)

    def store(self) -> None:
        self.there.copy_(self.here)


def state_of(member: "Member", piece: Piece, step: Tensor) -> tuple[list[Tensor | None], SplitScales | None]:
    """A piece's part of the state in the order of Member.at_rest; `step` is its own count."""
    if piece.whole:
        return member.at_rest(), None
    part = _state.part(member.state, member.kinds, piece.begin, piece.begin + piece.numel) | {"step": step}
    if member.kinds.master == "master_param":
        begin, end = piece.begin // _GRAIN, -(-(piece.begin + piece.numel) // _GRAIN)
        part["witness"] = member.state["witness"][begin:end]
    split = None
    if "scales" in part:
        rows = part["scales"]
        if len(rows) > 1:
            split = SplitScales(rows)
            rows = split.here
        part["scales"] = rows.view(-1)
    return member._replace(state=part).at_rest(), split
