"""Converts the state of optimizers that are given to `parallelize` from the parameters' old layout to the new one.

A sharded state is gathered to a whole tensor and then split for the new layout, one state of one parameter at a time.
A state that is sharded in neither layout keeps its tensors.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torch_ext.comm.init_sync import broadcast
from torch_ext.optim.adamw import Adam
from torch_ext.optim.state import access, codec, load, save
from torch_ext.optim.state.state_dtypes import StateDtypes, first_moment
from torch_ext.optim.state.stateful import params_of
from torch_ext.params import local_shard, param_groups, reducer_registry
from torch_ext.policy.policy import Policy
from torch_ext.tensors import dense

_CALL = "parallelize(): the optimizer's states"  # names the call in errors about lost ranks


class _Entry(NamedTuple):
    """The state of one parameter under the old layout."""

    param: Tensor
    name: str
    kept: bool  # keep_32bit
    matrix: bool  # stepped by Muon
    like: Tensor  # has the whole parameter's shape and memory order
    local: local_shard.LocalShard
    flat_shard: bool
    owned: bool  # a reducer had the parameter: its state is equal on every rank already, or each rank has its part
    at_rest: Mapping[str, Any]  # as stored
    logical: Mapping[str, Any]  # this rank's part, decoded when it is read


class CarriedStates:
    """The states of one optimizer, on their way from the old layout to the new one."""

    def __init__(self, optimizer: Adam, model: torch.nn.Module) -> None:
        """Reads the states and changes nothing. Raises RuntimeError if states must not be moved now."""
        optimizer.refuse_moving("parallelize(optimizer=...)")
        if optimizer.stepped_in_backward():
            raise RuntimeError(
                "parallelize(optimizer=...) between a backward that stepped (step_in_backward=True) and step(), "
                "which all-gathers the weights: call step() first"
            )
        optimizer.refuse_unfinished("parallelize(optimizer=...)")
        self.optimizer = optimizer
        mine = {id(p) for p in model.parameters()}
        self._entries: dict[int, _Entry] = {}
        for p in params_of(optimizer):
            if first_moment(p.stored) is None or id(p.param) not in mine:
                continue
            _refuse_converted(p.local.weight, p.stored, p.kinds, p.name)
            logical = save.entry_of(p)
            owned = reducer_registry.owner_of(p.param) is not None
            self._entries[p.index] = _Entry(
                p.param,
                p.name,
                p.kept,
                p.kinds.matrix,
                p.param.detach(),
                p.local,
                p.flat_shard,
                owned,
                p.stored,
                logical,
            )

    def lines(self) -> list[str]:
        """Returns, as text, what must be equal on all ranks."""
        return [
            f"optimizer with state of {e.name} after {int(e.at_rest['step'])} steps in {sorted(e.logical)}, "
            f"{_described(self._kinds(e, self.optimizer.policy))}, "
            f"flat shard {e.flat_shard}, reduced before {e.owned}"
            for e in self._entries.values()
        ]

    def _kinds(self, entry: _Entry, policy: Policy) -> StateDtypes:
        kinds = StateDtypes.of(policy, entry.param.dtype, entry.param.numel(), entry.kept, entry.matrix)
        return kinds.with_average(self.optimizer.averaging.dtype, entry.param.dtype, entry.name)

    def refuse(self, policy: Policy, before: Policy | None, ranks: frozenset[int]) -> None:
        """Raises ValueError if the new policy needs states in other dtypes, or if states are sharded over other ranks.
        before: the old layout's policy, which the states fit, too; None if there was no layout."""
        for entry in self._entries.values():
            own, wanted = self._kinds(entry, self.optimizer.policy), self._kinds(entry, policy)
            if wanted != own and (before is None or wanted != self._kinds(entry, before)):
                raise ValueError(
                    f"the policy has changed: it stores the state of {entry.name} as {_described(wanted)}, and the "
                    f"optimizer has {_described(own)}. parallelize does not convert the dtypes of states: pass "
                    "optimizer.policy, or load the optimizer's state_dict() into a new optimizer"
                )
            owner = reducer_registry.owner_of(entry.param)
            if entry.flat_shard and owner is not None and owner.ranks != ranks:
                raise ValueError(
                    f"the state of {entry.name} is sharded over ranks {sorted(owner.ranks)}, and the process group "
                    f"has ranks {sorted(ranks)}; parallelize keeps states only within the same ranks. Save the state "
                    "with torch.distributed.checkpoint and load it there"
                )

    def install(self, group: dist.ProcessGroup) -> None:
        """Installs the states, converted to the new layout, in the optimizer. Collective. For parameters that had no
        reducer, the first rank's states are copied to the group, as its weights are."""
        if not self._entries:
            return
        optimizer = self.optimizer
        all_params = param_groups.all_params(optimizer.param_groups)
        locals_, hosts = optimizer.current_shards(all_params), optimizer.on_host(all_params)
        state: dict[Any, Any] = {p: self._unchanged(p, optimizer.stored_state(p)) for p in self._not_carried()}
        with dense.normal_tensors():
            for i in list(self._entries):
                entry = self._entries.pop(i)  # popped: the old state is freed when the new one exists
                state[all_params[i]] = self._converted(entry, all_params[i], locals_.of(i), group, hosts[i])
        optimizer.__setstate__({"state": state, "param_groups": optimizer.param_groups})

    def _not_carried(self) -> Iterator[Tensor]:
        """Returns the parameters whose state stays: it has no moments yet, or belongs to another model."""
        all_params = param_groups.all_params(self.optimizer.param_groups)
        return (p for i, p in enumerate(all_params) if i not in self._entries and self.optimizer.stored_state(p))

    def _unchanged(self, p: Tensor, at_rest: Mapping[str, Any]) -> load.EncodedEntry:
        in_state = first_moment(access.peek(self.optimizer.state, p)) is not None or first_moment(at_rest) is None
        return load.EncodedEntry(dict(at_rest), not in_state)  # step() moves it if needed

    def _converted(
        self, entry: _Entry, p: Tensor, local: local_shard.LocalShard, group: dist.ProcessGroup, host: bool
    ) -> Any:
        """Returns an entry's state in the new layout. host: whether it is stored in the host's memory."""
        step = entry.at_rest["step"]
        weight = local.weight.detach()
        stays = not entry.flat_shard and not local_shard.is_flat_shard(p, local)
        if stays and local_shard.is_dtensor(p) == local_shard.is_dtensor(entry.like):
            if not entry.owned and not local_shard.is_dtensor(p):  # a DTensor's is each rank's own shard
                _broadcast(list(entry.at_rest.values()), group, weight.device)
            return self._unchanged(p, entry.at_rest)
        kinds, weight_like = self._kinds(entry, self.optimizer.policy), weight.cpu() if host else weight
        (made,) = codec.make([(weight_like, kinds)])
        for key in kinds.logical():
            whole = save.gather_whole(entry.like, entry.local, entry.logical[key], None, entry.flat_shard, _CALL)
            if not entry.owned:
                whole = whole.detach().clone(memory_format=torch.preserve_format)
                _broadcast([whole], group, weight.device)
            codec.encode(weight_like, made, kinds, key, load.part(p, local, whole))
        if not entry.owned:
            _broadcast([step], group, weight.device)
        return load.EncodedEntry({"step": step, **made}, host)


def _broadcast(tensors: list[Tensor], group: dist.ProcessGroup, device: torch.device) -> None:
    """Broadcasts tensors in place, through copies on `device`, the back end's; some may be in host memory."""
    there = [t.to(device) for t in tensors]
    broadcast(there, group, _CALL)
    for t, sent in zip(tensors, there, strict=True):
        if sent is not t:
            t.copy_(sent)


def carried(
    given: Any,
    model: torch.nn.Module,
    policy: Policy,
    before: "tuple[str, Policy] | None",
    strategy: str,
    ranks: frozenset[int],
) -> tuple[list[torch.optim.Optimizer], list[CarriedStates]]:
    """Returns the optimizers that `parallelize` was given, and the states of those that are ours. Changes nothing.

    before: the old layout's strategy and policy. Raises TypeError, ValueError or RuntimeError if an optimizer's state
    cannot be converted.
    """
    optimizers = [given] if isinstance(given, torch.optim.Optimizer) else list(given or [])
    found = []
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer is a {type(optimizer).__name__}; an optimizer, or a list of them, is legal")
        if isinstance(optimizer, Adam):
            one = CarriedStates(optimizer, model)
            one.refuse(policy, None if before is None else before[1], ranks)
            found.append(one)
        elif before is None or {before[0], strategy} not in ({"no_shard"}, {"optim_grads_params"}):
            raise TypeError(
                f"{type(optimizer).__name__} cannot be passed as optimizer= from "
                f"{before[0] if before else 'no strategy'!r} to {strategy!r}: its state would have to be converted "
                "to the new layout, which parallelize does for torch_ext.AdamW and torch_ext.Adam only; other "
                "optimizers are legal if the strategy stays no_shard or optim_grads_params"
            )
    return optimizers, found


def _refuse_converted(weight: Tensor, at_rest: Mapping[str, Any], kinds: StateDtypes, name: str) -> None:
    fits = kinds.complete(at_rest) and all(
        at_rest[key].dtype == dtype and at_rest[key].shape == weight.shape for key, dtype in kinds.moments.items()
    )
    if not fits:
        raise ValueError(
            f"the state of {name} is not that of a parameter of shape {tuple(weight.shape)} in {weight.dtype}: a model "
            "that was converted after its optimizer took steps needs a new optimizer"
        )


def _described(kinds: StateDtypes) -> str:
    master = {None: "no master", "master_param": "an fp32 master"}.get(kinds.master, "a master in remainders")
    return f"moments in {kinds.exp_avg} and {kinds.exp_avg_sq} with {master}"
