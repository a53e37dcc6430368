"""Finds Muon's matrices and their owners without an optimizer, to plan memory."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_ext.optim.muon import hyper, newton_schulz
from torch_ext.optim.muon.matrix_forms import Chooser, Matrix, Split, matrices
from torch_ext.optim.muon.matrix_member import transfer_dtype_of
from torch_ext.optim.muon.owners import CMatrix, planned
from torch_ext.params.keep_32bit import Kept
from torch_ext.policy.policy import Policy


class MuonOptions(NamedTuple):
    """The arguments of torch_ext.Muon that decide how much memory its matrices need."""

    ns: str = "standard"
    ns_dtype: torch.dtype | str | None = None
    """None: counted as fp32, which needs more memory, since it is unknown which is faster on the planned machine."""
    ns_steps: int = 5
    adamw_params: Kept | Iterable[Kept] = ()
    split: Mapping[str, Split] | None = None
    model: nn.Module | None = None
    """The model; its output layer is left to AdamW."""
    threads: int | None = None
    """torch's threads on each rank; 0: a GPU multiplies; None: 0 in a plan for GPUs (`slots`), else as many as torch
    has here."""


class PlannedMatrices(NamedTuple):
    """The matrices of `planned_matrices`."""

    rows: list[CMatrix]  # `param` is a position in `named`
    params: frozenset[int]  # positions in `named` of parameters that have matrices


def planned_matrices(
    named: Sequence[tuple[str, Tensor]], policy: Policy, world_size: int, options: MuonOptions
) -> PlannedMatrices:
    """Returns the matrices of these parameters with their owners. named: in registration order; a parameter that occurs
    twice counts once. Raises ValueError if none is a matrix, and whatever torch_ext.Muon would raise."""
    if options.ns not in hyper.ITERATIONS:
        raise ValueError(f"ns is {options.ns!r}; {', '.join(map(repr, hyper.ITERATIONS))} are legal")
    once = {id(tensor): i for i, (_, tensor) in reversed(list(enumerate(named)))}
    chosen = sorted(once.values())
    chooser = Chooser(options.adamw_params, options.split, options.model)
    names, params = [named[i][0] for i in chosen], [named[i][1] for i in chosen]
    group: dict[str, Any] = {"params": params, "param_names": names, "algorithm": None}
    forms = chooser.forms(group, "")
    chooser.refuse_unused([group])
    products = hyper.NS_DTYPES[hyper.dtype_name(options.ns_dtype) or "float32"]
    found: list[tuple[int, Matrix]] = []
    for i, tensor, form in zip(chosen, params, forms, strict=True):
        found += [(i, m) for m in matrices(tensor.shape, form)] if form is not None else []
    if not found:
        raise ValueError("no parameter is a matrix that Muon steps: give shapes of two dimensions or more")
    sizes = [newton_schulz.operations(m.rows, m.columns, options.ns_steps, options.ns, products) for _, m in found]
    owners, _ = planned(sizes, world_size)
    wires = {i: policy.row(named[i][1].dtype).grad_comm_dtype for i, _ in found}
    rows = [
        CMatrix.of(i, m, transfer_dtype_of(wires[i], products), products, owner)
        for (i, m), owner in zip(found, owners, strict=True)
    ]
    return PlannedMatrices(rows, frozenset(i for i, _ in found))
