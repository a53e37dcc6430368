"""Reads what an optimizer trains: each tensor that it updates, the model's parameter behind it, and its state."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_ext.diagnosis import master_copies, optimizer_layers
from torch_ext.diagnosis.master_copies import Copy
from torch_ext.diagnosis.model_parameters import ModelParameters, is_narrow, readable
from torch_ext.optim.muon import hyper
from torch_ext.optim.optimizer_base import OptimizerBase
from torch_ext.optim.state.state_dtypes import StateDtypes
from torch_ext.params import local_shard
from torch_ext.params.shard_map import ShardMap


class Trained(NamedTuple):
    """A tensor in a parameter group of an innermost optimizer."""

    names: tuple[str, ...]
    """The model's parameters of which it is the whole, a shard or a copy; empty if it is not the model's."""
    param: Tensor
    """The tensor in the group."""
    root: Tensor
    """The model's weight: `param` itself, or the weight of which `param` is a copy."""
    weight: Tensor | None
    """This rank's elements of the weight; None if they cannot be read."""
    stepped: Tensor | None
    """This rank's elements of `param`; None if they cannot be read."""
    group: Mapping[str, Any]
    state: Mapping[str, Any]
    optimizer: Any
    keeps: str | None
    """What keeps small updates of a 16-bit weight: "a master", "remainders", ...; None: nothing does."""

    def kinds_of_ours(self) -> StateDtypes:
        """Returns the dtypes of its state; only for an optimizer of this package."""
        kept = self.group.get("keep_32bit") or ()
        flags = [flag for p, flag in zip(self.group["params"], kept, strict=False) if p is self.param]
        matrix = "ns_steps" in self.group
        return StateDtypes.of(self.optimizer.policy, self.param.dtype, self.param.numel(), any(flags), matrix)

    @property
    def narrow(self) -> bool:
        """Whether it is a 16-bit weight without a master or anything else that keeps small updates."""
        return self.keeps is None and is_narrow(self.root)

    def hyper(self, name: str, default: float = 0.0) -> float:
        """Returns a hyper-parameter as a number."""
        value = self.group.get(name, default)
        return default if value is None else float(value)

    def betas(self) -> tuple[float, float] | None:
        found = self.group.get("betas")
        if not isinstance(found, list | tuple) or len(found) < 2:
            return None
        return float(found[0]), float(found[1])

    def step(self) -> float | None:
        """Returns how many steps the parameter had; None if neither its state nor its group counts them."""
        value = self.state.get("step", self.group.get("step"))
        return None if value is None else float(value)


@dataclasses.dataclass
class Reading:
    """Everything that the checks read."""

    model: ModelParameters
    layers: list[Any]
    trained: list[Trained]
    """Tensors in groups that belong to the model's parameters that require a gradient."""
    foreign: list[Trained]
    """Tensors in groups that are not the model's."""
    copies: list[Copy]
    in_groups: set[str]
    """Names of the model's parameters that are in a group."""
    partial: bool
    """Whether some parameters may be in another rank's optimizer only."""
    policy: Any = None


def read(model: ModelParameters, optimizers: Sequence[Any], policy: Any) -> Reading:
    """Reads the model and its optimizers. Masters that a training script created itself count as copies."""
    layers = [layer for optimizer in optimizers for layer in optimizer_layers.layers(optimizer)]
    layers = [layer for i, layer in enumerate(layers) if not any(layer is before for before in layers[:i])]
    copies = master_copies.copies(layers, list(model.named.values()))
    reading = _reading_of(model, layers, copies, policy)
    by_hand = _masters_by_hand(reading)
    return _reading_of(model, layers, copies + by_hand, policy) if by_hand else reading


def _reading_of(model: ModelParameters, layers: list[Any], copies: list[Copy], policy: Any) -> Reading:
    """Reads all parameter groups, given the copies of weights that are known."""
    everything = _Finder(model, copies).all(layers)
    in_groups = {name for t in everything for name in t.names}
    for layer in layers:
        in_groups |= {name for _, p in optimizer_layers.params_of(layer) for name in model.names_in(p)}
    in_groups |= {name for p in master_copies.members(layers) for name in model.names_in(p)}
    trainable = model.trainable()
    trained = [t for t in everything if any(name in trainable for name in t.names)]
    foreign = [t for t in everything if not t.names]
    return Reading(model, layers, trained, foreign, copies, in_groups, master_copies.sharded_over_ranks(layers), policy)


def _masters_by_hand(reading: Reading) -> list[Copy]:
    """Finds masters that a training script created from the model's 16-bit weights, copying gradients and weights
    itself. Such a tensor is in a group, is wider than 16 bits, and has the shape of a trainable weight that is in no
    group. Of several such weights it belongs to the one that it rounds to, else to the first. Returns nothing if one of
    the foreign tensors fits no weight."""
    missing = [p for n, p in reading.model.trainable().items() if n not in reading.in_groups and is_narrow(p)]
    found: list[Copy] = []
    for t in reading.foreign:
        alike = [p for p in missing if _may_be_copy(t.param, p)]
        if not alike:
            return []
        weight = next((p for p in alike if _rounds(t.param, p)), alike[0])
        missing = [p for p in missing if p is not weight]
        found.append(Copy(weight, t.param, "the optimizer's groups", t.optimizer))
    return found


def _may_be_copy(copy: Tensor, weight: Tensor) -> bool:
    kinds = [local_shard.is_dtensor(t) for t in (copy, weight)]
    return not is_narrow(copy) and copy.shape == weight.shape and kinds[0] == kinds[1]


def _rounds(copy: Tensor, weight: Tensor) -> bool:
    a, b = readable(copy), readable(weight)
    return a is not None and b is not None and torch.equal(a.to(b.dtype).to(b.device), b)


class _Finder:
    """Finds the trained tensors in the groups of optimizer layers."""

    def __init__(self, model: ModelParameters, copies: Sequence[Copy]) -> None:
        self._model = model
        self._source = {id(copy.copy): copy.weight for copy in copies}
        self._copied: dict[int, list[Tensor]] = {}
        for copy in copies:
            self._copied.setdefault(id(copy.weight), []).append(copy.copy)

    def all(self, layers: Sequence[Any]) -> list[Trained]:
        return [one for layer in optimizer_layers.stepped(layers) for one in self._of(layer)]

    def _of(self, optimizer: Any) -> list[Trained]:
        pairs = list(optimizer_layers.params_of(optimizer))
        locals_ = _local_parts(optimizer, [p for _, p in pairs])
        return [self._trained(optimizer, group, p, local) for (group, p), local in zip(pairs, locals_, strict=True)]

    def _trained(self, optimizer: Any, group: dict[str, Any], p: Tensor, local: Tensor | None) -> Trained:
        root = p
        for _ in range(8):  # follows copies of copies; bounded in case they form a circle
            if id(root) not in self._source:
                break
            root = self._source[id(root)]
        state = optimizer_layers.state_of(optimizer, p)
        keeps = master_copies.keeps_precision(state, group, optimizer)
        if self._has_master(root, 8) or _makes_master(optimizer, p, state):
            keeps = "a master"
        weight, own = local if root is p else readable(root), _own_group(group, p)
        return Trained(self._model.names_in(root), p, root, weight, local, own, state, optimizer, keeps)

    def _has_master(self, weight: Tensor, depth: int) -> bool:
        """Whether a copy of the weight, or a copy of a copy, has more than 16 bits."""
        found = self._copied.get(id(weight), []) if depth else []
        return any(one.dtype.itemsize > 2 or self._has_master(one, depth - 1) for one in found)


def _own_group(group: Mapping[str, Any], p: Tensor) -> Mapping[str, Any]:
    """Returns the group's hyper-parameters for p. In torch_ext.Muon's groups they are AdamW's unless p is a matrix."""
    forms = zip(group["params"], group.get("matrices") or (), strict=False)
    if all(q is not p or form is not None for q, form in forms):
        return group
    return {key: group[key] for key in group if key not in hyper.OF_MATRICES} | hyper.as_adamw(dict(group))


def _makes_master(optimizer: Any, p: Tensor, state: Mapping[str, Any]) -> bool:
    """Whether the parameter's first step is still to come, and will create a master."""
    if isinstance(optimizer, OptimizerBase):
        return p.requires_grad and StateDtypes.of(optimizer.policy, p.dtype, p.numel(), False).master is not None
    return not state and master_copies.promises_masters(optimizer)


def _local_parts(optimizer: Any, params: list[Tensor]) -> list[Tensor | None]:
    """Returns this rank's elements of each parameter. For our optimizers with sharded parameters these are the elements
    that this rank updates."""
    if not isinstance(optimizer, OptimizerBase):
        return [readable(p) for p in params]
    shards = ShardMap(params)
    found: list[Tensor | None] = []
    for i in range(len(params)):
        try:
            found.append(readable(shards.of(i).weight))
        except (RuntimeError, TypeError):  # the parameter is no longer in its buffer: the next step raises for that
            found.append(None)
    return found
