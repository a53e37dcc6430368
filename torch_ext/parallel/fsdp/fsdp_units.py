"""Chooses the modules that become FSDP2's units. A unit's parameters are gathered together, and their gradients reduced
together.

torch's fully_shard leaves this choice to its caller. The rule here is the usual one: each block of the model's
containers is a unit, the rest is the root's unit. But small neighbouring blocks share a unit. A model that its user has
sharded already keeps the user's units.
"""

import ctypes
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from torch_ext.native import constants, library
from torch_ext.policy.policy import Policy

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class FSDPUnit(NamedTuple):
    """A planned unit: the modules that fully_shard gets in one call, and their dtype."""

    modules: list[nn.Module]
    dtype: torch.dtype | None  # the trainable parameters'; None: there are none


def fsdp_modules(model: nn.Module) -> list[tuple[str, FSDPModule]]:
    """Returns the model's FSDP2 modules with their names, the outermost first."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, FSDPModule)]


def shard(units: Sequence[FSDPUnit], policy: Policy, group: dist.ProcessGroup, device: torch.device) -> None:
    """Calls fully_shard for each unit, over the group. Shards keep the bits that this rank's weights have.

    If most of the model is in fp32 and the policy is for bf16 or fp16, FSDP2 gathers and computes in the policy's
    dtype, and the fp32 shards are the master weights.
    """
    mesh = DeviceMesh.from_group(group, device.type)
    (model,) = units[-1].modules
    most = _dtypes(model.parameters(), set()).most_common(1)
    low_precision = policy.param_dtype if most and most[0][0] == torch.float32 else None
    for unit in units:
        compute = low_precision if unit.dtype in (None, torch.float32) else None
        # Our reduce-scatter converts to the wire's dtype itself, so it should get gradients in the dtype of backward
        # (from torch 2.15 on, None would mean the shards' dtype). But fp16 is widened to fp32, since FSDP2 would scale
        # fp16 gradients in fp16, before and after the sum.
        reduced = torch.float32 if torch.float16 in (compute, unit.dtype) else compute
        precision = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduced)
        fully_shard(unit.modules if len(unit.modules) > 1 else unit.modules[0], mesh=mesh, mp_policy=precision)


def units_of(model: nn.Module, bucket_size: int | None) -> list[FSDPUnit]:
    """Returns the units for the model: inner ones first, the model's own last. bucket_size: the policy's, in elements.

    Raises ValueError if a module itself has trainable parameters of several dtypes.
    """
    held = _holders(model)
    times = Counter(module for _, module in model.named_modules(remove_duplicate=False))
    units: list[FSDPUnit] = []
    for blocks in _containers(model):
        # A block that shares a parameter with modules outside is no unit: that parameter belongs to an outer unit,
        # which contains all of these modules.
        unshared = [block for block in blocks if all(held[p] == n * times[block] for p, n in _holders(block).items())]
        for run in _runs(unshared, bucket_size):
            units += _merge_units([_split(block) for block in run])
    taken = {id(p) for unit in units for module in unit.modules for p in module.parameters()}
    return [*_without_duplicates(units + _split(model, taken))]


def _runs(blocks: Sequence[nn.Module], bucket_size: int | None) -> list[Sequence[nn.Module]]:
    """Groups neighbouring blocks that share a unit (tx_fsdp_units)."""
    n = len(blocks)
    numels = (ctypes.c_int64 * n)(*(sum(p.numel() for p in block.parameters()) for block in blocks))
    ends = (ctypes.c_int64 * n)()
    join = library.function(
        "tx_fsdp_units", ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, restype=ctypes.c_int64
    )
    n_runs = join(numels, n, constants.NO_INT if bucket_size is None else bucket_size, ends)
    return [blocks[begin:end] for begin, end in pairwise([0, *ends[:n_runs]])]


def _merge_units(blocks: Sequence[Sequence[FSDPUnit]]) -> list[FSDPUnit]:
    """Merges blocks that share a unit, each given as the units that `_split` returned. Returns one unit for each dtype
    of the inner units, then one for each dtype of the blocks' own units."""
    modules: dict[tuple[bool, torch.dtype | None], list[nn.Module]] = {}
    for *inner, whole in blocks:
        for unit in inner:
            modules.setdefault((True, unit.dtype), []).extend(unit.modules)
        modules.setdefault((False, whole.dtype), []).extend(whole.modules)
    return [
        FSDPUnit(of_dtype, dtype) for (_, dtype), of_dtype in sorted(modules.items(), key=lambda item: not item[0][0])
    ]


def _without_duplicates(units: Sequence[FSDPUnit]) -> Iterator[FSDPUnit]:
    """Removes repeated modules: a module of another dtype that several modules share was found in each of them."""
    seen: set[nn.Module] = set()
    for unit in units:
        new = [m for m in dict.fromkeys(unit.modules) if m not in seen]
        seen.update(new)
        if new:
            yield FSDPUnit(new, unit.dtype)


def _holders(module: nn.Module) -> Counter[int]:
    """Counts, by parameter id, in how many modules each parameter is registered. A module that is registered in several
    places counts in each."""
    modules = (m for _, m in module.named_modules(remove_duplicate=False))
    return Counter(id(p) for m in modules for p in {*m._parameters.values()} if p is not None)


def _containers(module: nn.Module) -> Iterator[list[nn.Module]]:
    """Yields, for each of the outermost containers, its children that have parameters."""
    if not isinstance(module, _CONTAINERS):
        for child in module.children():
            yield from _containers(child)
        return
    blocks: list[nn.Module] = []
    for child in module.children():
        if _cannot_run(child):
            yield from _containers(child)
        elif next(child.parameters(), None) is not None:
            blocks.append(child)
    yield blocks


def _cannot_run(module: nn.Module) -> bool:
    """Whether the module is a container without a forward of its own, before which FSDP2 could gather parameters."""
    return isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward


def _split(module: nn.Module, taken: "frozenset[int] | set[int]" = frozenset()) -> list[FSDPUnit]:
    """Returns the units for a module: first those of inner modules that have another dtype, since a unit has one dtype;
    last the module's own. taken: ids of parameters that other units have."""
    own = _dtypes(module.parameters(recurse=False), taken) or _dtypes(module.parameters(), taken)
    dtype = own.most_common(1)[0][0] if own else None
    return [*_other_units(module, dtype, taken), FSDPUnit([module], dtype)]


def _other_units(
    module: nn.Module, dtype: torch.dtype | None, taken: "frozenset[int] | set[int]"
) -> Iterator[FSDPUnit]:
    """Yields the units of the module's inner modules that have trainable parameters of another dtype."""
    own = _dtypes(module.parameters(recurse=False), taken)
    if len(own) > 1:
        raise ValueError(
            f"{type(module).__name__} has trainable parameters in {' and '.join(sorted(map(str, own)))}; FSDP2 takes "
            "one dtype in a unit: convert them, or put those of one dtype into a module of their own"
        )
    for child in module.children():
        inside = _dtypes(child.parameters(), taken)
        if set(inside) <= {dtype}:
            continue
        if _cannot_run(child):
            yield from _other_units(child, dtype, taken)
            continue
        *inner, unit = _split(child, taken)
        yield from inner
        if unit.dtype != dtype:
            yield unit


def _dtypes(params: Iterator[nn.Parameter], taken: "frozenset[int] | set[int]") -> Counter[torch.dtype]:
    """Counts the elements of each dtype in the trainable parameters that no other unit has."""
    elements: Counter[torch.dtype] = Counter()
    for p in params:
        if p.requires_grad and id(p) not in taken:
            elements[p.dtype] += max(1, p.numel())
    return elements
