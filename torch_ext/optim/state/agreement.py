"""Compares the dtypes of optimizer states between the ranks that reduce gradients together, once, before the first
step. Where states are sharded, parts in different dtypes could not be put together or saved in a checkpoint; where they
are not, the ranks' weights would silently diverge."""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from torch_ext.comm import group_calls
from torch_ext.native import dtypes
from torch_ext.optim.state import averaging
from torch_ext.optim.state.param_state import ParamState
from torch_ext.optim.state.state_dtypes import MASTERS, StateDtypes
from torch_ext.params import reducer_registry

_CODES_PER_PARAM = 4  # see _codes

_CALL = "step(): what each rank keeps as optimizer state"


def refuse_differing(members: Sequence[ParamState]) -> None:
    """Raises RuntimeError on every rank, naming a parameter and two ranks with their dtypes, where the ranks differ.
    Collective over the process groups of our reducers: their gradients are present on all ranks or on none, so that all
    ranks make the call."""
    by_groups: dict[tuple[torch.distributed.ProcessGroup, ...], list[ParamState]] = {}
    for member in members:
        if (owner := reducer_registry.owner_of(member.param)) is None:
            continue
        groups = tuple(member.local.groups) or tuple(filter(None, [owner.replicas]))
        if groups:
            by_groups.setdefault(groups, []).append(member)
    for groups, sharded in by_groups.items():
        codes = [code for member in sharded for code in _codes(member.kinds)]
        digest = hashlib.sha256(repr((codes, [m.name for m in sharded])).encode()).digest()[:8]
        mine = torch.tensor(
            [len(sharded), int.from_bytes(digest, "little", signed=True)], device=sharded[0].weight.device
        )
        for group in groups:
            rows = _gathered(mine, group)
            if all(torch.equal(row, mine) for row in rows):
                continue
            if any(int(row[0]) != len(sharded) for row in rows):
                counts = ", ".join(str(int(row[0])) for row in rows)
                raise RuntimeError(f"{_CALL}: the ranks of a group step {counts} parameters; they must be the same")
            _refuse(sharded, _gathered(mine.new_tensor(codes), group), group)


_EMAS = (None, *averaging.DTYPES)


def _codes(kinds: StateDtypes) -> tuple[int, int, int, int]:
    """Returns the dtypes of exp_avg, exp_avg_sq and master, and the kind of average, as numbers that can be sent."""
    master = None if kinds.master is None else MASTERS[kinds.master]
    exp_avg, exp_avg_sq, master_code = (
        0 if d is None else dtypes.code_of(d) or 0 for d in (kinds.exp_avg, kinds.exp_avg_sq, master)
    )
    return exp_avg, exp_avg_sq, master_code, _EMAS.index(kinds.ema)


def _gathered(mine: Tensor, group: torch.distributed.ProcessGroup) -> list[Tensor]:
    rows = [torch.empty_like(mine) for _ in range(group.size())]
    group_calls.all_gather(rows, mine, group, _CALL).wait()
    return rows


def _refuse(sharded: Sequence[ParamState], rows: Sequence[Tensor], group: torch.distributed.ProcessGroup) -> None:
    ranks = torch.distributed.get_process_group_ranks(group)
    for i, member in enumerate(sharded):
        kept = [tuple(row[_CODES_PER_PARAM * i : _CODES_PER_PARAM * i + _CODES_PER_PARAM].tolist()) for row in rows]
        for rank, other in zip(ranks, kept, strict=True):
            if other != kept[0]:
                raise RuntimeError(
                    f"{_CALL}: of {member.name} rank {ranks[0]} keeps {_described(kept[0])}, and rank {rank} "
                    f"{_described(other)}; states, policy, min_8bit_size and keep_32bit must be the same on all ranks"
                )
    raise RuntimeError(f"{_CALL}: the ranks step parameters of different names, or in another order")


def _described(codes: tuple[int, ...]) -> str:
    exp_avg, exp_avg_sq, master = (dtypes.name_of(dtypes.dtype_of(code)) for code in codes[:3])
    average = f", averages in {_EMAS[codes[3]]}" if codes[3] else ""
    kept = f"masters in {master}" if master else "no master"
    return f"exp_avg in {exp_avg}, exp_avg_sq in {exp_avg_sq}, {kept}{average}"
