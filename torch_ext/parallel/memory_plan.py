"""Computes the bytes per rank of a training run before anything is allocated. C does the arithmetic (tx_memory_plan);
this file describes models to it."""

import ctypes
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from torch_ext.comm.communicator import IN_FLIGHT
from torch_ext.native import dtypes as native_dtypes
from torch_ext.native import library, structs
from torch_ext.optim.muon.owners import CMatrix
from torch_ext.optim.muon.planned_matrices import MuonOptions, planned_matrices
from torch_ext.optim.state.averaging import NO_AVERAGING, Averaging
from torch_ext.optim.state.state_dtypes import EMA, EMA_PLANES, MASTERS, StateDtypes
from torch_ext.parallel import message_plan
from torch_ext.parallel.bucket_plan import CLayout, plan_of
from torch_ext.parallel.strategies import table
from torch_ext.params.keep_32bit import Selection
from torch_ext.policy.policy import Policy


@structs.mirror("tx_memory_state")
class _MemoryState(library.Struct):
    """The dtypes of a parameter's optimizer state."""


@structs.mirror("tx_memory_unit")
class _MemoryUnit(library.Struct):
    """An FSDP2 unit: parameters that are gathered together."""


@structs.mirror("tx_memory_args")
class _MemoryArgs(library.Struct):
    """The arguments of tx_memory_plan: a layout, a strategy, and what is stored for each parameter."""


class MemoryPlan(NamedTuple):
    """Bytes of one rank under one strategy. tx_memory_plan in csrc/torch_ext_advanced.h explains each field."""

    strategy: str
    params: int
    grads: int
    masters: int
    moments: int
    scales: int
    steps: int
    transient: int
    moving: int
    emas: int
    changes: int
    products: int
    stepping: int
    total: int
    peak: int


_PARTS = MemoryPlan._fields[1:]


@structs.mirror("tx_memory")
class _Memory(library.Struct):
    """The result of tx_memory_plan: bytes of one rank."""


class Unit(NamedTuple):
    """A unit of optim_grads_params: parameters of one dtype that are gathered together."""

    name: str
    numel: int
    trained: int  # how many of these elements get a gradient
    dtype: torch.dtype  # the parameters'


def plan_memory(
    params_or_numels: Iterable[Any] | Mapping[str, Any],
    policy: Policy,
    world_size: int,
    chosen: Sequence[str] | None = None,
    *,
    units: Sequence[Unit] | None = None,
    frozen_bytes: int = 0,
    slots: bool = False,
    keep_32bit: Sequence[str] = (),
    ema_dtype: "torch.dtype | str | None" = None,
    publisher: bool = False,
    exact: bool = False,
    muon: MuonOptions | None = None,
) -> list[MemoryPlan]:
    """Returns the memory of each chosen strategy (None: all), for the layout of `plan_buckets` with these arguments.
    Messages of several buckets are counted as the policy's link_gbps makes them; without it, as large as they can get.

    units: what optim_grads_params gathers at a time; None: each parameter alone, which takes the least memory.
    frozen_bytes: bytes of the frozen parameters. slots: buckets are on GPUs, sent from slots that stay allocated
    (`Slots` in comm/streams.py). keep_32bit: the optimizer's argument, names and patterns. ema_dtype: the optimizer's
    argument, if it has an ema_decay; None: no average. publisher: counts a WeightPublisher for the trained weights;
    exact: one with exact=True. muon: torch_ext.Muon steps the matrices, with these arguments.
    Raises ValueError or TypeError for illegal arguments.
    """
    layout = CLayout(params_or_numels, policy, world_size)
    if units is None:
        units = [Unit(name, tensor.numel(), tensor.numel(), tensor.dtype) for name, tensor in layout.named]
    matrices = None if muon is None else planned_matrices(layout.named, policy, world_size, muon)
    args = _MemoryArgs(
        size=ctypes.sizeof(_MemoryArgs),
        layout=ctypes.pointer(layout.args),
        places=layout.places,
        buckets=layout.buckets,
        n_buckets=layout.n_buckets,
        states=_states_of(layout, policy, keep_32bit, frozenset() if matrices is None else matrices.params, ema_dtype),
        n_units=len(units),
        units=(_MemoryUnit * max(1, len(units)))(*(_unit_of(policy, u, units) for u in units)),
        frozen_bytes=frozen_bytes,
        in_flight=IN_FLIGHT,
        slots=slots,
        gather_dtype=0 if policy.grad_gather_dtype is None else native_dtypes.code_of(policy.grad_gather_dtype),
        publishes=publisher,
        distances=exact,
        **_ema_arguments(Averaging.of(0.0, ema_dtype, 1) if ema_dtype else NO_AVERAGING),
        **_matrix_arguments([] if matrices is None else matrices.rows, _threads_of(muon, slots)),
    )
    workspace = _workspace_of(args)
    args.workspace = ctypes.addressof(workspace)
    plan = library.function("tx_memory_plan", ctypes.POINTER(_MemoryArgs), ctypes.POINTER(_Memory))
    plans, buckets = [], plan_of(layout, world_size).buckets
    for strategy in table.strategies() if chosen is None else chosen:
        if strategy not in table.strategies():
            raise ValueError(f"strategy is {strategy!r}; legal are {', '.join(table.strategies())}")
        args.strategy = table.strategies().index(strategy)
        _set_messages(message_plan.decide(buckets, world_size, policy, policy.link_gbps, strategy), args)
        memory = _Memory()
        plan(ctypes.byref(args), ctypes.byref(memory))
        plans.append(MemoryPlan(strategy, *(getattr(memory, part) for part in _PARTS)))
    return plans


def _set_messages(messages: message_plan.Messages, args: _MemoryArgs) -> None:
    args.compressed = messages.compressed
    if messages.link_gbps is not None:
        args.ends = (ctypes.c_int64 * len(messages.ends))(*messages.ends)
        args.n_messages = len(messages.ends)


def _ema_arguments(averages: Averaging) -> dict[str, int]:
    if averages.dtype is None:
        return {}
    planes = {EMA: averages.dtype} if isinstance(averages.dtype, torch.dtype) else EMA_PLANES
    return {"ema_dtype": native_dtypes.code_of(next(iter(planes.values()))) or 0, "ema_lows": len(planes) - 1}


def _matrix_arguments(rows: Sequence[CMatrix], threads: int) -> dict[str, Any]:
    matrices = (CMatrix * max(1, len(rows)))(*rows)
    return {"threads": threads, "n_matrices": len(rows), "matrices": matrices}


def _threads_of(muon: MuonOptions | None, on_gpus: bool) -> int:
    """Returns the threads that multiply matrices; 0: a GPU does."""
    if muon is not None and muon.threads is not None:
        return muon.threads
    return 0 if on_gpus else torch.get_num_threads()


def _workspace_of(args: _MemoryArgs) -> Any:
    """Returns the workspace of tx_memory_plan. The caller keeps it alive."""
    nbytes = library.function("tx_memory_workspace_bytes", ctypes.c_void_p, restype=ctypes.c_int64, keep_gil=True)
    return (ctypes.c_int64 * -(-nbytes(ctypes.byref(args)) // 8))()


def _states_of(layout: CLayout, policy: Policy, keep_32bit: Sequence[str], of_muon: frozenset[int], ema: Any) -> Any:
    """Returns each parameter's optimizer state dtypes, in C's form. of_muon: positions of the parameters that Muon
    steps."""
    kept = Selection(keep_32bit, "keep_32bit").flags([t for _, t in layout.named], [n for n, _ in layout.named], True)
    forms = [
        (tensor.dtype, tensor.numel(), keep, i in of_muon)
        for i, ((_, tensor), keep) in enumerate(zip(layout.named, kept, strict=True))
    ]
    kinds = {form: _state_of(policy, *form, ema) for form in set(forms)}
    return (_MemoryState * max(1, len(forms)))(*(kinds[form] for form in forms))


def _state_of(policy: Policy, dtype: torch.dtype, numel: int, keep_32bit: bool, matrix: bool, ema: Any) -> _MemoryState:
    kinds = StateDtypes.of(policy, dtype, numel, keep_32bit, matrix).with_average(ema, dtype, "a parameter")
    stored = (kinds.exp_avg, kinds.exp_avg_sq, None if kinds.master is None else MASTERS[kinds.master])
    return _MemoryState(*(0 if one is None else native_dtypes.code_of(one) for one in stored))


def _unit_of(policy: Policy, unit: Unit, units: Sequence[Unit]) -> _MemoryUnit:
    """Returns a unit in C's form. Its dtypes must match those that `fsdp_units.shard` chooses, and the wire's dtype in
    `parallel/fsdp/reduce_scatter.py`."""
    elements: Counter[torch.dtype] = Counter()
    for u in units:
        elements[u.dtype] += u.numel
    narrows = unit.dtype == torch.float32 == elements.most_common(1)[0][0]
    computed = policy.param_dtype if narrows else unit.dtype
    row = policy.row(computed) if unit.trained else None
    wire = computed if row is None else row.grad_comm_dtype or row.main_grads_dtype or computed
    dtypes = (computed, torch.float32 if computed == torch.float16 else computed, wire)
    return _MemoryUnit(unit.numel, unit.trained, *map(native_dtypes.code_of, dtypes))


# -- models -------------------------------------------------------------------------------------------------------


def frozen_bytes(model: nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters() if not p.requires_grad)


def units_of(model: nn.Module, bucket_size: int | None = None) -> list[Unit]:
    """Returns the units that `parallelize` makes for optim_grads_params, frozen parameters included, inner ones first.

    bucket_size: the policy's. Raises ValueError if the model cannot be sharded.
    """
    from torch_ext.parallel.fsdp import fsdp_units  # imports torch's FSDP2: only where it is used

    names = {id(module): name for name, module in model.named_modules()}
    seen: set[int] = set()
    units: list[Unit] = []
    for unit in fsdp_units.units_of(model, bucket_size):
        elements: Counter[torch.dtype] = Counter()
        trained: Counter[torch.dtype] = Counter()
        for p in (p for module in unit.modules for p in module.parameters()):
            if id(p) not in seen:
                seen.add(id(p))
                elements[p.dtype] += p.numel()
                trained[p.dtype] += p.numel() * p.requires_grad
        name = ", ".join(names[id(module)] for module in unit.modules)
        units += (Unit(name, numel, trained[dtype], dtype) for dtype, numel in elements.items())
    return units
