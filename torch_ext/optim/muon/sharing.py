"""How a parameter that Muon updates is distributed: on one rank alone, replicated over ranks, or sharded over them."""

from typing import NamedTuple

import torch
from torch import Tensor

from torch_ext.optim.muon.matrix_forms import MatrixForm
from torch_ext.optim.state.param_state import ParamState
from torch_ext.params import local_shard, reducer_registry
from torch_ext.params.local_shard import is_dtensor, is_flat_shard
from torch_ext.tensors import dense


class Sharing(NamedTuple):
    """The ranks that share the work on a parameter's matrices."""

    group: torch.distributed.ProcessGroup
    runs: tuple[tuple[int, int], ...] | None
    """The elements [begin, end) of the parameter that each rank has, in memory order; None: each has all of them."""


def sharing_of(m: ParamState) -> Sharing | None:
    """Returns how the parameter is shared; None: this rank has all of it and does all the work. Raises RuntimeError,
    naming the parameter, if it is sharded in a way that Muon does not support."""
    reducer = reducer_registry.owner_of(m.param)
    if is_dtensor(m.param):
        return _of_dtensor(m)
    if is_flat_shard(m.param, m.local):
        assert reducer is not None
        (group,) = m.local.groups
        return Sharing(group, tuple(reducer.runs(m.param))) if group.size() > 1 else None
    replicas = None if reducer is None else reducer.replicas
    return Sharing(replicas, None) if replicas is not None and replicas.size() > 1 else None


def _of_dtensor(m: ParamState) -> Sharing | None:
    groups = [group for group in m.local.groups if group.size() > 1]
    if not groups:
        return None
    runs = local_shard.runs_of_dtensor(m.param)
    if len(groups) > 1 or runs is None or not _is_local_run(runs[groups[0].rank()], m):
        raise RuntimeError(
            f"{m.name} is sharded with placements {tuple(m.param.placements)}, and Muon gathers only matrices that "  # type: ignore[attr-defined]
            "are sharded by rows over one dimension of the mesh: Shard(0), as fully_shard does, is legal; or put it "
            "into a group with algorithm='adamw'"
        )
    return Sharing(groups[0], tuple(runs))


def _is_local_run(run: tuple[int, int], m: ParamState) -> bool:
    """Whether these elements are the ones that this rank has."""
    begin, end = run
    return end - begin == m.weight.numel() and (begin == end or begin == m.local.offset)


def refuse(m: ParamState, form: MatrixForm) -> None:
    """Raises RuntimeError if the rows of the parameter's matrices are not consecutive in memory."""
    whole = m.weight if is_dtensor(m.param) else m.param
    if not (whole.is_contiguous() or (_is_matrix(whole, form) and dense.is_dense(whole[:1]))):
        raise RuntimeError(
            f"{m.name} has strides {tuple(whole.stride())}, and Muon needs rows that are contiguous in memory: make "
            "the parameter from a contiguous tensor"
        )


def _is_matrix(weight: Tensor, form: MatrixForm) -> bool:
    """Whether the weight is one matrix with consecutive rows; a row's elements may be in any order (channels_last)."""
    return (form.flattened or weight.dim() == 2) and weight.stride(0) * weight.shape[0] == weight.numel()
