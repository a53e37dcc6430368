"""Finds the copies of weights in higher precision that optimizers keep, by tables of attribute names."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_ext.diagnosis import optimizer_layers
from torch_ext.diagnosis.optimizer_layers import attribute_of

# Pairs of a wrapper's attributes: lists (of lists) of weights, and lists of their copies in the same order.
_LISTS = (
    ("float16_groups", "fp32_from_float16_groups"),  # Megatron-LM, masters of whole parameters
    ("shard_float16_groups", "shard_fp32_from_float16_groups"),  # Megatron-LM's distributed optimizer
    ("fp16_groups", "fp32_from_fp16_groups"),  # apex
    ("all_fp16_params", "all_fp32_from_fp16_params"),  # apex.amp's opt_level="O2", in _amp_stash
    ("fp16_groups_flat", "fp32_groups_flat"),  # DeepSpeed's FP16_Optimizer
    ("fp16_partitioned_groups_flat", "fp32_partitioned_groups_flat"),  # DeepSpeed, stage 3
)
# The same for weights that are sharded: the first attribute has one list per group, with an element for each rank.
_CUT_LISTS = (
    ("parallel_partitioned_bit16_groups", "single_partition_of_fp32_groups"),  # DeepSpeed, stages 1 and 2
    ("bf16_partitioned_groups", "fp32_groups_flat_partition"),  # DeepSpeed's BF16_Optimizer
)
# Dicts from a weight to its copy: Megatron-LM's HybridDeviceOptimizer, which steps the last copy of a chain.
_DICTS = ("param_to_fp32_param", "gpu_params_map_cpu_copy")
# Groups like the optimizer's, but with copies (apex); and one flat list of copies for all groups.
_GROUPS, _LIST = "param_groups_master", "master_params"
# Keys in the state of a parameter; ours and Transformer Engine's first.
IN_STATE = ("master_param", "master_weight", "master_weights", "master", "main_param", "fp32_param", "fp32_master")
_ON_PARAM = ("main_param",)  # attributes of a parameter: Megatron-LM
# Attributes with parameters that are trained although the optimizer's groups have other tensors in their place.
_MEMBERS = (
    *("float16_groups", "fp32_from_fp32_groups", "model_float16_groups", "model_fp32_groups"),
    *("fp16_groups", "bit16_groups", "bf16_groups", "fp32_groups", "all_fp16_params"),
)
_CUT_OVER_RANKS = ("shard_fp32_from_float16_groups", "fp32_partitioned_groups_flat")


class Copy(NamedTuple):
    """A copy of a weight that an optimizer keeps, and copies back to the weight in each step."""

    weight: Tensor
    copy: Tensor
    where: str
    """Where the copy is kept, for messages: "fp32_from_float16_groups", "state['master_param']"."""
    holder: Any
    """The optimizer layer that keeps the copy."""


def copies(layers: Sequence[Any], params: Sequence[Tensor]) -> list[Copy]:
    """Returns all copies that are found in these optimizer layers and on these parameters, each once."""
    found = chain(
        *(_of_layer(holder, layer) for layer in layers for holder in (layer, attribute_of(layer, "_amp_stash"))),
        _of_states(layers),
        _of_params(params),
    )
    once: dict[tuple[int, int], Copy] = {}
    for one in found:
        if one.copy is not one.weight:
            once.setdefault((id(one.weight), id(one.copy)), one)
    return list(once.values())


def _of_layer(holder: Any, layer: Any) -> Iterator[Copy]:
    """Yields the copies in a layer's attributes. holder: the layer, or an object in it that has these attributes."""
    for weights, masters in _LISTS:
        yield from _paired(_flat(attribute_of(holder, weights)), attribute_of(holder, masters), masters, layer)
    for weights, masters in _CUT_LISTS:
        of_groups = attribute_of(holder, weights)
        if isinstance(of_groups, list | tuple):
            own = [parts[_rank(layer, i)] for i, parts in enumerate(of_groups)]
            yield from _paired(own, attribute_of(holder, masters), masters, layer)
    for name in _DICTS:
        for weight, copy in _items(attribute_of(holder, name)):
            yield Copy(weight, copy, name, layer)
    groups = attribute_of(holder, _GROUPS)
    if isinstance(groups, list | tuple):
        params = [list(group["params"]) for group in optimizer_layers.groups_of(layer)]
        beside = [group.get("params") for group in groups if isinstance(group, Mapping)]
        yield from _paired(_flat(params), beside, _GROUPS, layer)
    yield from _paired([p for _, p in optimizer_layers.params_of(layer)], attribute_of(holder, _LIST), _LIST, layer)


def _paired(weights: Sequence[Any], masters: Any, where: str, layer: Any) -> Iterator[Copy]:
    """Yields the pairs of two lists of tensors; nothing if their lengths differ, since pairs cannot be told then."""
    if not isinstance(masters, list | tuple):
        return
    flat = _flat(masters)
    if len(flat) != len(weights):
        return
    for weight, copy in zip(weights, flat, strict=True):
        if isinstance(weight, Tensor) and isinstance(copy, Tensor):
            yield Copy(weight, copy, where, layer)


def _flat(nested: Any) -> list[Any]:
    if isinstance(nested, list | tuple):
        return [one for part in nested for one in _flat(part)]
    return [nested]


def _items(mapping: Any) -> Iterator[tuple[Tensor, Tensor]]:
    if isinstance(mapping, Mapping):
        for weight, copy in mapping.items():
            if isinstance(weight, Tensor) and isinstance(copy, Tensor):
                yield weight, copy


def _rank(layer: Any, group: int) -> int:
    """Returns this process's rank among the ranks over which a parameter group is sharded."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return 0
    over = attribute_of(layer, "real_dp_process_group")
    return dist.get_rank(over[group] if isinstance(over, list) and group < len(over) else None)


def _of_states(layers: Sequence[Any]) -> Iterator[Copy]:
    for layer in layers:
        for _, p in optimizer_layers.params_of(layer):
            state = optimizer_layers.state_of(layer, p)
            for key in IN_STATE:
                copy = state.get(key)
                if isinstance(copy, Tensor) and copy.is_floating_point():  # an int16 remainder fits any weight
                    yield Copy(p, copy, f"state[{key!r}]", layer)


def _of_params(params: Sequence[Tensor]) -> Iterator[Copy]:
    for p in params:
        for name in _ON_PARAM:
            copy = attribute_of(p, name)
            if isinstance(copy, Tensor) and not attribute_of(p, f"{name}_sharded"):
                yield Copy(p, copy, f"the parameter's .{name}", None)


def keeps_precision(state: Mapping[str, Any], group: Mapping[str, Any], optimizer: Any) -> str | None:
    """Returns what, other than a master, keeps small updates of a 16-bit weight: a remainder, a compensation, or
    unbiased rounding. None: nothing known does."""
    for key in ("master_remainder", *IN_STATE):
        value = state.get(key)
        if isinstance(value, Tensor) and value.dtype in (torch.int16, torch.uint16):
            return "remainders"
    if any(isinstance(state.get(key), Tensor) for key in ("kahan_comp", "compensation")):
        return "Kahan summation"
    for name in ("kahan_sum", "use_kahan_summation"):
        if group.get(name) or attribute_of(optimizer, name) is True:
            return "Kahan summation"
    for name in ("bf16_stochastic_round", "stochastic_rounding", "stochastic_round"):
        if group.get(name) is True or attribute_of(optimizer, name) is True:
            return "stochastic rounding"
    rounding = group.get("weight_rounding")
    return f"{rounding} rounding" if rounding in ("dithered", "stochastic") else None


def promises_masters(optimizer: Any) -> bool:
    """Whether the optimizer was created with an option that asks for masters (apex, Transformer Engine)."""
    return any(attribute_of(optimizer, name) is True for name in ("master_weights", "use_master"))


def members(layers: Sequence[Any]) -> Iterator[Tensor]:
    """Yields parameters that wrappers train although no parameter group has them."""
    for layer in layers:
        for holder in (layer, attribute_of(layer, "_amp_stash")):
            for name in _MEMBERS:
                yield from (one for one in _flat(attribute_of(holder, name)) if isinstance(one, Tensor))


def sharded_over_ranks(layers: Sequence[Any]) -> bool:
    """Whether this rank's optimizer knows only a part of the model's parameters."""
    import torch.distributed as dist

    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return several and any(attribute_of(layer, name) is not None for layer in layers for name in _CUT_OVER_RANKS)
