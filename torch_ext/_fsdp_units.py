"""Which modules become units of FSDP2: parameters that are gathered together and whose gradients travel together.

torch's fully_shard asks its caller for that. The rule here is the usual one: the blocks of the model's containers, then
the rest as the root's unit. A model that its user has sharded already keeps the user's units.
"""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from torch_ext._policy import Policy

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class Unit(NamedTuple):
    module: nn.Module
    dtype: torch.dtype | None  # of its trainable parameters; None: it has none


def fsdp_modules(model: nn.Module) -> list[tuple[str, FSDPModule]]:
    """The model's sharded modules by name, the outermost first."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, FSDPModule)]


def shard(units: list[Unit], policy: Policy, group: dist.ProcessGroup, device: torch.device) -> None:
    """fully_shard of each unit over the group; what a rank keeps of a weight is what the rank has of it.

    Where most of a model is in fp32 and the policy is for bf16 or fp16, FSDP2 gathers and computes in that dtype, and
    the fp32 shards are the masters.
    """
    mesh = DeviceMesh.from_group(group, device.type)
    most = _dtypes(units[-1].module.parameters(), set()).most_common(1)
    narrow = policy.param_dtype if most and most[0][0] == torch.float32 else None
    for unit in units:
        compute = narrow if unit.dtype in (None, torch.float32) else None
        # The reduce-scatter has a wire of its own: gradients are handed to it as backward made them. But fp16 is
        # widened, since FSDP2 would scale it in fp16, before and after the sum.
        reduced = torch.float32 if torch.float16 in (compute, unit.dtype) else None
        fully_shard(unit.module, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduced))


def units_of(model: nn.Module) -> list[Unit]:
    """Inner ones first, the model last. ValueError where a module itself has trainable parameters of several dtypes."""
    held = _holders(model)
    units: list[Unit] = []
    for block in _blocks(model):
        # A parameter that is shared with modules outside belongs to the unit that contains them all.
        if all(held[p] == n for p, n in _holders(block).items()):
            units += _split(block)
    taken = {id(p) for unit in units for p in unit.module.parameters()}
    return units + _split(model, taken)


def _holders(module: nn.Module) -> Counter[int]:
    """How many modules hold each parameter."""
    return Counter(id(p) for m in module.modules() for p in {*m._parameters.values()} if p is not None)


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The children of the outermost containers, those that hold parameters."""
    for child in module.children():
        if not isinstance(module, _CONTAINERS) or _cannot_run(child):
            yield from _blocks(child)
        elif next(child.parameters(), None) is not None:
            yield child


def _cannot_run(module: nn.Module) -> bool:
    """A container without a forward of its own, before which parameters could be gathered."""
    return isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward


def _split(module: nn.Module, taken: "frozenset[int] | set[int]" = frozenset()) -> list[Unit]:
    """The module as a unit, before it those of its modules that have another dtype: a unit has one."""
    own = _dtypes(module.parameters(recurse=False), taken) or _dtypes(module.parameters(), taken)
    dtype = own.most_common(1)[0][0] if own else None
    return [*_others(module, dtype, taken), Unit(module, dtype)]


def _others(module: nn.Module, dtype: torch.dtype | None, taken: "frozenset[int] | set[int]") -> Iterator[Unit]:
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
            yield from _others(child, dtype, taken)
            continue
        *inner, unit = _split(child, taken)
        yield from inner
        if unit.dtype != dtype:
            yield unit


def _dtypes(params: Iterator[nn.Parameter], taken: "frozenset[int] | set[int]") -> Counter[torch.dtype]:
    """Of the trainable ones, by their numbers of elements."""
    elements: Counter[torch.dtype] = Counter()
    for p in params:
        if p.requires_grad and id(p) not in taken:
            elements[p.dtype] += max(1, p.numel())
    return elements
