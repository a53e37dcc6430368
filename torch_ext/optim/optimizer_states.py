"""Parameters and their groups, this rank's parts of them, and their stored state."""

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
    """The attributes that the parts of an optimizer read from it, since users and frameworks may replace them there."""

    policy: Policy
    skip_nonfinite: bool
    on_external_write: str
    param_groups: list[dict[str, Any]]
    state: Any
    compared_ranks: bool
    averaging: Averaging

    @property
    def adamw_groups(self) -> list[dict[str, Any]]:
        """The parameter groups with AdamW's hyper-parameters."""
        ...


class OptimizerStates:
    """Finds the stored states of an optimizer's parameters, and creates them where they are missing."""

    def __init__(
        self, optimizer: Settings, host: HostStates, counts: Tensor, forms: dict[Tensor, param_form.Form]
    ) -> None:
        self._optimizer = weakref.ref(optimizer)  # weak: a cycle would be freed by the garbage collector only
        self.host = host
        self.counts = counts
        """int64 [2, 2], on the parameters' device: steps skipped, elements whose master became the weight. Row 0: of
        the first call of the operator in a step; row 1: of later calls, which count a skipped step again."""
        self.synced: dict[Tensor, SyncedVersion] = {}
        """Parameters whose fp32 masters are known to round to their weights; the last step's plan may know better."""
        self.changes: WeightChanges | None = None
        """What steps record about changed weights for a weight publisher; None where there is none."""
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
        """The publisher of the weights, if there is one."""
        known = None if self.changes is None else self.changes.watcher
        return None if known is None else known()

    # -- parameters

    def all_params(self) -> list[Tensor]:
        return param_groups.all_params(self.groups)

    def current_shards(self, all_params: list[Tensor]) -> shard_map.ShardMap:
        """Returns where this rank's parts of the parameters are; the same object as long as that is unchanged."""
        offload_guard.refuse_optimizer(self.optimizer, all_params)  # type: ignore[arg-type]
        if self._shards is None or not self._shards.fits(all_params):
            self._shards = shard_map.ShardMap(all_params)
            self.host.follow_moved(all_params, self.state)
            if not self.has_any_state():
                self.follow_params()
        return self._shards

    def follow_params(self) -> None:
        """Moves step counts and counters to the parameters' device, to which a model may move before its first step."""
        for group in self.groups:
            entries = [(p, access.entry(self.state, p)) for p in group["params"] if p.requires_grad]
            if any("step" in entry and entry["step"].device != p.device for p, entry in entries):
                self.make_steps(group)
        device = next((p.device for p in self.all_params() if p.requires_grad), torch.device("cpu"))
        self.counts = self.counts.to(device)

    @dense.normal_tensors()
    def make_steps(self, group: dict[str, Any]) -> None:
        """Makes the step counts of a group views of one tensor. Trainable parameters without a count get 0."""
        counted = [p for p in group["params"] if p.requires_grad or "step" in access.peek(self.state, p)]
        if counted:
            steps = torch.zeros(len(counted), dtype=torch.float32, device=counted[0].device).unbind()
            for p, step in zip(counted, (one.as_subclass(dense.SharingTensor) for one in steps), strict=True):
                entry = access.entry(self.state, p)
                self.host.follow(p, entry, step)
                step.fill_(float(entry.get("step", 0)))
                entry["step"] = step

    # -- state

    def stored_state(self, p: Tensor) -> Mapping[str, Any]:
        """Returns the stored state of p, from opt.state or from the host; empty where there is none."""
        return self.host.peek(p, access.peek(self.state, p))

    def has_state(self, p: Tensor) -> bool:
        """Whether p has more state than its step count."""
        return first_moment(self.stored_state(p)) is not None

    def has_any_state(self) -> bool:
        return any(map(self.has_state, self.all_params()))

    def on_host(self, all_params: list[Tensor]) -> list[bool]:
        """Returns for each parameter whether it is stepped on the host."""
        shards, kept = self.current_shards(all_params), param_groups.kept_32bit(self.groups)
        matrices = param_groups.are_matrices(self.groups)

        def size(i: int) -> int:
            p = all_params[i]
            if not p.requires_grad and not self.has_state(p):
                return 0
            return self._kinds(p, kept[i], matrices[i], "").nbytes(shards.of(i).weight.numel())

        return self.host.choose(len(all_params), size)

    @dense.normal_tensors()
    def members(self, all_params: list[Tensor], wanted: list[bool]) -> list[ParamState]:
        """Returns the wanted parameters with their states, which are created where they are missing."""
        names, ids = param_groups.names(self.groups), param_groups.ids(self.groups)
        kept, matrices = param_groups.kept_32bit(self.groups), param_groups.are_matrices(self.groups)
        group_of = [g for g, group in enumerate(self.groups) for _ in group["params"]]
        chosen = [i for i, want in enumerate(wanted) if want]
        shards = self.current_shards(all_params)
        local = {i: shards.of(i) for i in chosen}
        for i in chosen:  # check all of them before the first state is created
            dense.refuse_param(local[i].weight, names[i])
        self.refuse_converted([(names[i], all_params[i]) for i in chosen])
        on_host = self.on_host(all_params)
        members = [
            ParamState(
                all_params[i],
                local[i],
                self.host.entry(self.state, all_params[i], on_host[i]),
                self._kinds(all_params[i], kept[i], matrices[i], names[i]),
                ids[i],
                group_of[i],
                names[i],
                on_host[i],
                self.changes_of(all_params[i], local[i].weight, on_host[i]),
                self._row(all_params[i], local[i].weight, on_host[i]),
            )
            for i in chosen
        ]
        for m in _complete(members):
            if m.kinds.master == "master_param":
                self.synced[m.param] = SyncedVersion.of(m)
        self.note_forms([m.param for m in members])
        return members

    def changes_of(self, p: Tensor, weight: Tensor, host: bool) -> dict[str, Tensor]:
        """Returns where steps record changes of `weight`, this rank's part of p. host: it is stepped on the host."""
        device = torch.device("cpu") if host else weight.device
        return {} if self.changes is None else self.changes.record_of(p, weight.numel(), device)

    def _row(self, p: Tensor, weight: Tensor, host: bool) -> Tensor | None:
        """Returns where the next step adds its measurements of p; None where it does not measure."""
        device = torch.device("cpu") if host else weight.device
        return None if self.measuring.next is None else self.measuring.next.row(p, device)

    def _kinds(self, p: Tensor, kept: bool, matrix: bool, name: str) -> StateDtypes:
        optimizer = self.optimizer
        kinds = StateDtypes.of(optimizer.policy, p.dtype, p.numel(), kept, matrix)
        return kinds.with_average(optimizer.averaging.dtype, p.dtype, name)

    def make_all(self) -> None:
        """Creates the missing states of all trainable parameters. Changes no weight and no step count."""
        all_params = self.all_params()
        known = dict(self.synced)
        with torch.no_grad():
            self.members(all_params, [p.requires_grad or self.has_state(p) for p in all_params])
        self.synced = known  # without the new masters: the first step compares them, in case of a write before it

    def drop_removed(self, all_params: list[Tensor]) -> None:
        """Drops the states and records of parameters that the optimizer no longer has. all_params: the ones it has."""
        present = set(all_params)
        for gone in [p for p in self.state if isinstance(p, Tensor) and p not in present]:
            dict.pop(self.state, gone)
        self.host.keep_only(present)
        if self.changes is not None:
            self.changes.keep_only(present)
        self.synced = {p: synced for p, synced in dict(self.synced).items() if p in present}
        self._forms = {p: form for p, form in dict(self._forms).items() if p in present}

    def compare_ranks(self, members: list[ParamState]) -> None:
        """Compares the dtypes of states over the ranks, once: RuntimeError where they differ. Collective for parameters
        whose gradients a reducer of ours reduces."""
        optimizer = self.optimizer
        if not optimizer.compared_ranks:
            agreement.refuse_differing(members)
            optimizer.compared_ranks = True

    # -- what states were made for (see state/param_form.py)

    def refuse_converted(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Raises ValueError where a parameter no longer has the dtype, shape and placements of its state."""
        known = [(name, p, self._forms[p]) for name, p in named if p in self._forms]
        param_form.refuse_converted(
            (name, p, form) for name, p, form in known if not form.fits(p) and form.is_of(self.stored_state(p))
        )

    def forms_to_keep(self) -> dict[Tensor, param_form.Form]:
        """Returns the forms for a pickle or a copy: without the references that identify this optimizer's states."""
        return {p: form._replace(exp_avg=None) for p, form in self._forms.items() if form.is_of(self.stored_state(p))}

    def note_forms(self, params: Iterable[Tensor]) -> None:
        """Records that the states fit the parameters' current forms, or the forms that a pickle has saved."""
        for p in params:
            moment, form = first_moment(self.stored_state(p)), self._forms.get(p)
            if moment is None:
                self._forms.pop(p, None)
            elif form is not None and form.exp_avg is None:
                self._forms[p] = form._replace(exp_avg=weakref.ref(moment))
            else:
                self._forms[p] = param_form.form_of(p, moment)


def inherit_requests(known: OptimizerStates, states: OptimizerStates) -> None:
    """Takes over a publisher's and a measurement's requests from the OptimizerStates that a load replaces."""
    states.changes, states.measuring = known.changes, known.measuring
    if states.changes is not None:
        states.changes.all_written()


def _complete(members: list[ParamState]) -> list[ParamState]:
    """Creates what the members' states lack; returns the members that lacked something."""
    made: list[ParamState] = []
    for host in (False, True):  # separately: memory of states on the device may be offloaded (offloading/offload.py)
        missing = [m for m in members if m.host == host and not m.kinds.complete(m.state)]
        for m, new in zip(missing, codec.make([(m.weight_on_state_device, m.kinds) for m in missing]), strict=True):
            for key, value in new.items():  # in one operation: two threads that make the same state agree on it
                m.state.setdefault(key, value)
        made += missing
    for m in members:
        if "step" not in m.state:
            m.state.setdefault("step", torch.zeros((), dtype=torch.float32, device=m.weight.device))
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
    """Raises where the optimizer cannot train the new group. groups: all groups, the new one included. where: for
    messages. refuse: raises for hyper-parameters that no group may have. given: arguments of the constructor."""
    hyper_parameters.refuse_keys(group, where, given)
    refuse(group, where)
    hyper_parameters.refuse_differing(group, groups[0], where)
    all_params, names = param_groups.all_params(groups), param_groups.names(groups)
    trained = [(p, name) for p, name in zip(all_params, names, strict=True) if p.requires_grad]
    for p, name in trained:
        dense.refuse_param(local_shard.tensor_of(p), name)
        StateDtypes.of(policy, p.dtype, p.numel(), False).with_average(averaging.dtype, p.dtype, name)
    devices = {p.device: name for p, name in trained}
    if len(devices) > 1:
        places = " and ".join(f"{name} on {device}" for device, name in devices.items())
        raise ValueError(f"parameters are on several devices ({places}); make one optimizer per device")
    dense.refuse_overlap([local_shard.tensor_of(p) for p, _ in trained], [name for _, name in trained])
