"""A model's parameters by name, and which of them a tensor shares memory with.

Note: optimizers that shard or flatten parameters update views of them, or of a buffer to which the parameters were
moved. Only addresses show to which parameter such a view belongs: it begins and ends within the parameter's bytes.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torch_ext.params import local_shard
from torch_ext.policy import fsdp_groups
from torch_ext.tensors import storage

_NARROW = (torch.bfloat16, torch.float16)


def is_narrow(t: Tensor) -> bool:
    """Whether the tensor has a 16-bit floating-point dtype."""
    return t.dtype in _NARROW


class ModelParameters:
    """The parameters of one or several modules. With several, names are prefixed by the module's position."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.models = models
        self.named: dict[str, Tensor] = {}
        """First name -> parameter, each once. Under FSDP2 always the sharded parameter, even while it is unsharded."""
        sharded = _sharded_params(models)
        seen: set[int] = set()
        for i, model in enumerate(models):
            prefix = f"{i}." if len(models) > 1 else ""
            for name, found in model.named_parameters(prefix=prefix.rstrip(".")):
                p = sharded.get(id(found), found)
                if id(p) not in seen:
                    seen.add(id(p))
                    self.named[name] = p
        self._names = {id(p): name for name, p in self.named.items()}
        self._ranges = _ranges(self.named)

    def trainable(self) -> dict[str, Tensor]:
        return {name: p for name, p in self.named.items() if p.requires_grad and p.is_floating_point()}

    def name_of(self, t: Tensor) -> str | None:
        """Returns the name of the parameter that is this very tensor; None if there is none."""
        return self._names.get(id(t))

    def names_in(self, t: Tensor) -> tuple[str, ...]:
        """Returns the names of the parameters whose memory overlaps the tensor's."""
        return tuple(dict.fromkeys(name for name, _ in self.parts_in(t)))

    def parts_in(self, t: Tensor) -> list[tuple[str, slice]]:
        """Returns these parameters, each with the slice of the tensor's elements (in logical order) that are its own.
        The slice is the whole tensor if the tensor is not contiguous."""
        if (name := self.name_of(t)) is not None:
            return [(name, slice(0, None))]
        found: list[tuple[str, slice]] = []
        for key, begin, end in _extents(t):
            for a, b, name in self._ranges.get(key, ()):
                if a < end and begin < b:
                    size = t.element_size()
                    whole = not t.is_contiguous() or local_shard.is_dtensor(t)
                    part = slice(max(a - begin, 0) // size, (min(b, end) - begin) // size)
                    found.append((name, slice(0, None) if whole else part))
        return found

    def wanted_precision(self) -> Iterator[tuple[str, torch.dtype]]:
        """Yields the parameters that a mixed-precision policy of FSDP2 or FSDP casts for forward and backward, with the
        dtype."""
        for model in self.models:
            for group in fsdp_groups.in_model(model):
                for param in group.fsdp_params:
                    if param.mp_policy.param_dtype is not None:
                        yield from self._cast([param.sharded_param], param.mp_policy.param_dtype)
            for module in model.modules():  # FSDP's first version
                dtype = getattr(getattr(module, "mixed_precision", None), "param_dtype", None)
                if isinstance(dtype, torch.dtype):
                    yield from self._cast(module.parameters(recurse=True), dtype)

    def _cast(self, params: Iterable[Tensor], dtype: torch.dtype) -> Iterator[tuple[str, torch.dtype]]:
        for p in params:
            if p.requires_grad and (name := self.name_of(p)) is not None:
                yield name, dtype


def _sharded_params(models: Sequence[nn.Module]) -> dict[int, Tensor]:
    """Returns id of FSDP2's unsharded parameter, which the module has between forward and backward -> sharded one."""
    found: dict[int, Tensor] = {}
    for model in models:
        for group in fsdp_groups.in_model(model):
            for param in group.fsdp_params:
                gathered = getattr(param, "_unsharded_param", None)
                if gathered is not None:
                    found[id(gathered)] = param.sharded_param
    return found


_Key = tuple[torch.device, int]


def _extents(t: Any) -> Iterator[tuple[_Key, int, int]]:
    """Yields where a tensor's memory is: its storage, and the addresses of its first byte and past its last one."""
    for part in storage.unwrapped(t):
        if part.is_meta or part.layout is not torch.strided or part.numel() == 0 or storage.is_released(part):
            continue
        extent = 1 + sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
        begin = part.data_ptr()
        yield (part.device, part.untyped_storage().data_ptr()), begin, begin + extent * part.element_size()


def _ranges(named: dict[str, Tensor]) -> dict[_Key, list[tuple[int, int, str]]]:
    found: dict[_Key, list[tuple[int, int, str]]] = {}
    for name, p in named.items():
        for t in (p, getattr(p, "ds_tensor", None)):  # ds_tensor: this rank's shard under DeepSpeed's stage 3
            if isinstance(t, Tensor):
                for key, begin, end in _extents(t):
                    found.setdefault(key, []).append((begin, end, name))
    return found


def readable(t: Any) -> Tensor | None:
    """Returns this rank's elements, detached; None if they cannot be read (meta, sparse, offloaded, quantized)."""
    local = local_shard.tensor_of(t)
    if local.is_meta or local.layout is not torch.strided or not local.is_floating_point():
        return None
    if hasattr(type(local), "__tensor_flatten__") or storage.is_released(local):
        return None
    return local.detach()
