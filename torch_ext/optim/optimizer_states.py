"""What is trained: parameters and their groups, where this rank's parts of them lie, and their stored state."""

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from torch_ext.optim.cpu_offload.host_states import HostStates
from torch_ext.optim.state import access, agreement, codec, param_form
from torch_ext.optim.state.averaging import Averaging
from torch_ext.optim.state.measurement import Measuring
from torch_ext.optim.state.param_state import ParamState
from torch_ext.optim.state.state_dtypes import StateDtypes, first_moment
from torch_ext.optim.state.weight_changes import Watcher, WeightChanges
from torch_ext.optim.state.write_check import SyncedVersion
from torch_ext.params import hyper_parameters, local_shard, param_groups, shard_map
from torch_ext.policy.policy import Policy
from torch_ext.tensors import dense, offload_guard


class Settings(Protocol):
    """What the parts of an optimizer read of it: users and frameworks may put other values, groups and states there."""

    policy: Policy
    skip_nonfinite: bool
    on_external_write: str
    param_groups: list[dict[str, Any]]
    state: Any
    compared_ranks: bool
    averaging: Averaging

    @property
    def adamw_groups(self) -> list[dict[str, Any]]:
        """The groups as AdamW's: with its hyper-parameters."""
        ...


class OptimizerStates:
    """Finds the parameters' states, and makes them where they are missing; steps nothing."""

    def __init__(
        self, optimizer: Settings, host: HostStates, counts: Tensor, forms: dict[Tensor, param_form.Form]
    ) -> None:
        self._optimizer = weakref.ref(optimizer)  # which holds this object, and shall go without the garbage collector
        self.host = host
        self.counts = counts
        """Steps skipped, elements whose master became the weight: by the first call of the operator in a step, by
        others (which skip the same step once more). int64 [2, 2], beside the parameters."""
        self.synced: dict[Tensor, SyncedVersion] = {}
        """Of fp32 masters: what is known without the plan of the last step, which knows better."""
        self.changes: WeightChanges | None = None
        """What steps say of the weights that they change, where somebody publishes these."""
        self.measuring = Measuring()
        self._forms = forms  # of the parameters that have state
        self._shards: shard_map.ShardMap | None = None

    @property
    def optimizer(self) -> Settings:
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer

    @property
    def groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        return self.optimizer.state

    @property
    def watcher(self) -> Watcher | None:
        """Who publishes the weights."""
        known = None if self.changes is None else self.changes.watcher
        return None if known is None else known()

    # -- parameters

    def everyone(self) -> list[Tensor]:
        return param_groups.everyone(self.groups)

    def current_shards(self, everyone: list[Tensor]) -> shard_map.ShardMap:
        """Where this rank's parts of the parameters are; the same object as long as they are there."""
        offload_guard.refuse_optimizer(self.optimizer, everyone)  # type: ignore[arg-type]
        if self._shards is None or not self._shards.fits(everyone):
            self._shards = shard_map.ShardMap(everyone)
            self.host.follow_moved(everyone, self.state)
            if not self.any_made():
                self.follow_params()
        return self._shards

    def follow_params(self) -> None:
        """To where they are now, before there is other state: a model may move after its optimizer was made."""
        for group in self.groups:
            entries = [(p, access.entry(self.state, p)) for p in group["params"] if p.requires_grad]
            if any("step" in entry and entry["step"].device != p.device for p, entry in entries):
                self.make_steps(group)
        device = next((p.device for p in self.everyone() if p.requires_grad), torch.device("cpu"))
        self.counts = self.counts.to(device)

    @dense.normal_tensors()
    def make_steps(self, group: dict[str, Any]) -> None:
        """The steps of a group as views of one tensor; zero for trainable parameters that have none."""
        counted = [p for p in group["params"] if p.requires_grad or "step" in access.peek(self.state, p)]
        if counted:
            steps = torch.zeros(len(counted), dtype=torch.float32, device=counted[0].device).unbind()
            for p, step in zip(counted, (one.as_subclass(dense.SharingTensor) for one in steps), strict=True):
                entry = access.entry(self.state, p)
                self.host.follow(p, entry, step)
                step.fill_(float(entry.get("step", 0)))
                entry["step"] = step

    # -- state

    def at_rest(self, p: Tensor) -> Mapping[str, Any]:
        """The state of p, wherever it lies; empty where there is none."""
        return self.host.peek(p, access.peek(self.state, p))

    def is_made(self, p: Tensor) -> bool:
        """Whether p has more state than its step."""
        return first_moment(self.at_rest(p)) is not None

    def any_made(self) -> bool:
        return any(map(self.is_made, self.everyone()))

    def on_host(self, everyone: list[Tensor]) -> list[bool]:
        """Which parameters are stepped on the host."""
        shards, kept = self.current_shards(everyone), param_groups.kept_32bit(self.groups)
        matrices = param_groups.are_matrices(self.groups)

        def size(i: int) -> int:
            p = everyone[i]
            if not p.requires_grad and not self.is_made(p):
                return 0
            return self._kinds(p, kept[i], matrices[i], "").nbytes(shards.of(i).weight.numel())

        return self.host.choose(len(everyone), size)

    @dense.normal_tensors()
    def members(self, everyone: list[Tensor], wanted: list[bool]) -> list[ParamState]:
        """The wanted parameters, with state that is made where it is missing."""
        names, ids = param_groups.names(self.groups), param_groups.ids(self.groups)
        kept, matrices = param_groups.kept_32bit(self.groups), param_groups.are_matrices(self.groups)
        group_of = [g for g, group in enumerate(self.groups) for _ in group["params"]]
        chosen = [i for i, want in enumerate(wanted) if want]
        shards = self.current_shards(everyone)
        local = {i: shards.of(i) for i in chosen}
        for i in chosen:  # all of them before the first state is made
            dense.refuse_param(local[i].weight, names[i])
        self.refuse_converted([(names[i], everyone[i]) for i in chosen])
        on_host = self.on_host(everyone)
        members = [
            ParamState(
                everyone[i],
                local[i],
                self.host.entry(self.state, everyone[i], on_host[i]),
                self._kinds(everyone[i], kept[i], matrices[i], names[i]),
                ids[i],
                group_of[i],
                names[i],
                on_host[i],
                self.changes_of(everyone[i], local[i].weight, on_host[i]),
                self._row(everyone[i], local[i].weight, on_host[i]),
            )
            for i in chosen
        ]
        for m in _complete(members):
            if m.kinds.master == "master_param":
                self.synced[m.param] = SyncedVersion.of(m)
        self.note_forms([m.param for m in members])
        return members

    def changes_of(self, p: Tensor, weight: Tensor, host: bool) -> dict[str, Tensor]:
        """What steps say of this weight, the part of p that this rank steps. host: it is stepped there."""
        device = torch.device("cpu") if host else weight.device
        return {} if self.changes is None else self.changes.beside(p, weight.numel(), device)

    def _row(self, p: Tensor, weight: Tensor, host: bool) -> Tensor | None:
        device = torch.device("cpu") if host else weight.device
        return None if self.measuring.next is None else self.measuring.next.row(p, device)

    def _kinds(self, p: Tensor, kept: bool, matrix: bool, name: str) -> StateDtypes:
        optimizer = self.optimizer
        kinds = StateDtypes.of(optimizer.policy, p.dtype, p.numel(), kept, matrix)
        return kinds.averaged(optimizer.averaging.dtype, p.dtype, name)

    def make_all(self) -> None:
        """The state of everything that is trained, as far as there is none. Moves no weight and no counter."""
        everyone = self.everyone()
        known = dict(self.synced)
        with torch.no_grad():
            self.members(everyone, [p.requires_grad or self.is_made(p) for p in everyone])
        self.synced = known  # what was made now is compared before the first step: a silent write may come between

    def drop_gone(self, everyone: list[Tensor]) -> None:
        """Forgets parameters that are not among these any more."""
        present = set(everyone)
        for gone in [p for p in self.state if isinstance(p, Tensor) and p not in present]:
            dict.pop(self.state, gone)
        self.host.keep_only(present)
        if self.changes is not None:
            self.changes.keep_only(present)
        self.synced = {p: synced for p, synced in self.synced.items() if p in present}
        self._forms = {p: form for p, form in self._forms.items() if p in present}

    def agree(self, members: list[ParamState]) -> None:
        """Once: RuntimeError where other ranks keep states of other kinds. Collective where states are cut."""
        optimizer = self.optimizer
        if not optimizer.compared_ranks:
            agreement.refuse_differing(members)
            optimizer.compared_ranks = True

    # -- what states were made for (see state/param_form.py)

    def refuse_converted(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """ValueError where a parameter is no longer what its state was made for."""
        known = [(name, p, self._forms[p]) for name, p in named if p in self._forms]
        param_form.refuse_converted(
            (name, p, form) for name, p, form in known if not form.fits(p) and form.is_of(self.at_rest(p))
        )

    def forms_to_keep(self) -> dict[Tensor, param_form.Form]:
        """For a pickle or a copy, which has states of its own."""
        return {p: form._replace(exp_avg=None) for p, form in self._forms.items() if form.is_of(self.at_rest(p))}

    def note_forms(self, params: Iterable[Tensor]) -> None:
        """Their states are right for them as they are now; where a pickle says what they are for, for that."""
        for p in params:
            moment, form = first_moment(self.at_rest(p)), self._forms.get(p)
            if moment is None:
                self._forms.pop(p, None)
            elif form is not None and form.exp_avg is None:
                self._forms[p] = form._replace(exp_avg=weakref.ref(moment))
            else:
                self._forms[p] = param_form.form_of(p, moment)


def go_on_from(known: OptimizerStates, states: OptimizerStates) -> None:
    """Takes over what others asked of the optimizer, when states are loaded into it: to publish, to measure."""
    states.changes, states.measuring = known.changes, known.measuring
    if states.changes is not None:
        states.changes.all_written()


def _complete(members: list[ParamState]) -> list[ParamState]:
    """Makes what their states lack; returns those that lacked something."""
    made: list[ParamState] = []
    for host in (False, True):  # not in one memory, which may leave the device (see offloading/offload.py)
        missing = [m for m in members if m.host == host and not m.kinds.complete(m.state)]
        for m, new in zip(missing, codec.make([(m.beside, m.kinds) for m in missing]), strict=True):
            m.state.update({key: value for key, value in new.items() if key not in m.state})
        made += missing
    for m in members:
        if "step" not in m.state:
            m.state["step"] = torch.zeros((), dtype=torch.float32, device=m.weight.device)
        codec.follow_param(m.weight.detach(), m.state, m.kinds, m.name)
    return made


def refuse_group(
    groups: list[dict[str, Any]],
    group: dict[str, Any],
    where: str,
    policy: Policy,
    averaging: Averaging,
    refuse: Callable[[dict[str, Any], str], None],
    given: Mapping[str, Any],
) -> None:
    """Raises where the optimizer of these groups, of which this one is new, cannot train it. where: for messages.
    refuse: raises for hyper-parameters that no group of it may have. given: to the constructor."""
    hyper_parameters.refuse_keys(group, where, given)
    refuse(group, where)
    hyper_parameters.refuse_differing(group, groups[0], where)
    everyone, names = param_groups.everyone(groups), param_groups.names(groups)
    trained = [(p, name) for p, name in zip(everyone, names, strict=True) if p.requires_grad]
    for p, name in trained:
        dense.refuse_param(local_shard.tensor_of(p), name)
        StateDtypes.of(policy, p.dtype, p.numel(), False).averaged(averaging.dtype, p.dtype, name)
    devices = {p.device: name for p, name in trained}
    if len(devices) > 1:
        places = " and ".join(f"{name} on {device}" for device, name in devices.items())
        raise ValueError(f"parameters are on several devices ({places}); make one optimizer per device")
    dense.refuse_overlap([local_shard.tensor_of(p) for p, _ in trained], [name for _, name in trained])
