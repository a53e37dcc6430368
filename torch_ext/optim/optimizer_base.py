"""What is trained: parameters and their groups, where this rank's parts of them lie, and their state at rest."""

import warnings
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from torch_ext.optim.cpu_offload.host_states import HostStates
from torch_ext.optim.state import access, codec, masters, param_form
from torch_ext.optim.state.masters import SyncedVersion
from torch_ext.optim.state.param_state import ParamState
from torch_ext.params import hyper_parameters, local_shard, param_groups, shard_map
from torch_ext.params.param_groups import Params
from torch_ext.policy.policy import Policy
from torch_ext.tensors import dense, offload_guard


class OptimizerStates(torch.optim.Optimizer):
    """Knows the parameters, makes and finds their state; steps nothing."""

    _decoupled: bool | None = None  # None: the group says

    # Derived from parameters, state and groups; None or empty where it has to be made again.
    _seen: dict[Tensor, SyncedVersion]
    _locals: shard_map.ShardMap | None
    _consolidated: dict[str, Any] | None  # handed out by the next state_dict(), until masters change
    _open: bool  # within master_weights()

    def __init__(self, params: Params, defaults: dict[str, Any], policy: Policy, offload_fraction: float) -> None:
        self.policy = policy
        self._host = HostStates(offload_fraction)
        self._forms: dict[Tensor, param_form.Form] = {}  # of the parameters that have state
        self._forget()
        hyper_parameters.refuse(defaults, "")
        super().__init__(params, defaults)
        self.state = access.TrackedState.of(self.state, handed_out=False, make=self._make_first_state)

    def _forget(self) -> None:
        """All that is derived."""
        self._seen = {}
        self._locals = None
        self._consolidated = None
        self._open = False

    def _rearranged(self) -> None:
        """Parameters, or this rank's parts of them, are others than they were: argument lists hold no longer."""

    # -- parameters ---------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. Refused, with what to do about it: parameters that are twice in it or share memory, complex,
        sparse, meta and inference tensors, other dtypes than float32, bfloat16 and float16; hyper-parameters that are
        no numbers, or not legal ones; and arguments of the constructor that a group cannot have, `policy` among them.
        """
        before = len(self.param_groups)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "optimizer contains a parameter group with duplicate parameters")
            try:
                super().add_param_group(param_group)
            except UserWarning:
                raise ValueError("a parameter is twice in one group; pass tied weights once") from None
        group = self.param_groups[before]
        try:
            self._admit(group, f"group {before}: ")
        except Exception:
            del self.param_groups[before]
            raise
        param_groups.fill(group, {}, self._decoupled)
        self._make_steps(group)
        self._rearranged()

    def _admit(self, group: dict[str, Any], where: str) -> None:
        hyper_parameters.refuse_keys(group, where)
        hyper_parameters.refuse(group, where)
        hyper_parameters.refuse_differing(group, self.param_groups[0], where)
        names = param_groups.names(self.param_groups)
        trained = [(p, name) for p, name in zip(self._everyone(), names, strict=True) if p.requires_grad]
        for p, name in trained:
            dense.refuse_param(local_shard.tensor_of(p), name)
            codec.kinds_of(self.policy, p.dtype)
        devices = {p.device: name for p, name in trained}
        if len(devices) > 1:
            places = " and ".join(f"{name} on {device}" for device, name in devices.items())
            raise ValueError(f"parameters are on several devices ({places}); make one optimizer per device")
        dense.refuse_overlap([local_shard.tensor_of(p) for p, _ in trained], [name for _, name in trained])

    @dense.to_stay()
    def _make_steps(self, group: dict[str, Any]) -> None:
        """The steps of a group as views of one tensor; zero for trainable parameters that have none."""
        counted = [p for p in group["params"] if p.requires_grad or "step" in access.peek(self.state, p)]
        if counted:
            steps = torch.zeros(len(counted), dtype=torch.float32, device=counted[0].device).unbind()
            for p, step in zip(counted, (one.as_subclass(dense.SharingTensor) for one in steps), strict=True):
                entry = access.entry(self.state, p)
                if "step" in entry:
                    step.fill_(float(entry["step"]))
                entry["step"] = step

    def _follow_params(self) -> None:
        """To where they are now, before there is other state: a model may move after its optimizer was made."""
        for group in self.param_groups:
            entries = [(p, access.entry(self.state, p)) for p in group["params"] if p.requires_grad]
            if any("step" in entry and entry["step"].device != p.device for p, entry in entries):
                self._make_steps(group)

    def _everyone(self) -> list[Tensor]:
        return param_groups.everyone(self.param_groups)

    def current_shards(self, everyone: list[Tensor]) -> shard_map.ShardMap:
        """Where this rank's parts of the parameters are."""
        offload_guard.refuse_optimizer(self, everyone)
        if self._locals is None or not self._locals.fits(everyone):
            self._locals = shard_map.ShardMap(everyone)
            self._rearranged()
            if not any("exp_avg" in self.state_at_rest(p) for p in everyone):
                self._follow_params()
        return self._locals

    # -- state --------------------------------------------------------------------------------------------------------

    @dense.to_stay()
    def _members(self, everyone: list[Tensor], wanted: list[bool]) -> list[ParamState]:
        """The wanted parameters, with state that is made where it is missing."""
        names, ids = param_groups.names(self.param_groups), param_groups.ids(self.param_groups)
        group_of = [g for g, group in enumerate(self.param_groups) for _ in group["params"]]
        chosen = [i for i, want in enumerate(wanted) if want]
        locals_ = self.current_shards(everyone)
        local = {i: locals_.of(i) for i in chosen}
        for i in chosen:  # all of them before the first state is made
            dense.refuse_param(local[i].weight, names[i])
        self._refuse_converted([(names[i], everyone[i]) for i in chosen])
        on_host = self.on_host(everyone)
        members = [
            ParamState(
                everyone[i],
                local[i],
                self._host.entry(self.state, everyone[i], on_host[i]),
                codec.kinds_of(self.policy, everyone[i].dtype),
                ids[i],
                group_of[i],
                names[i],
                on_host[i],
            )
            for i in chosen
        ]
        for host in (False, True):  # not in one memory, which may leave the device (see offloading/offload.py)
            missing = [m for m in members if m.host == host and not codec.complete(m.state, m.kinds)]
            for m, made in zip(missing, codec.make([(m.beside, m.kinds) for m in missing]), strict=True):
                m.state.update({key: value for key, value in made.items() if key not in m.state})
                if m.kinds.master is not None:
                    self._seen[m.param] = masters.look(m)
        for m in members:
            if "step" not in m.state:
                m.state["step"] = torch.zeros((), dtype=torch.float32, device=m.weight.device)
            codec.settle(m.weight.detach(), m.state, m.kinds, m.name)
        self._note_forms([m.param for m in members])
        return members

    def _make_state(self) -> None:
        """Of everything that is trained, as far as there is none. Moves no weight and no counter."""
        everyone = self._everyone()
        known = dict(self._seen)
        with torch.no_grad():
            self._members(everyone, [p.requires_grad or "exp_avg" in self.state_at_rest(p) for p in everyone])
        self._seen = known  # what was made now is checked before the first step: a silent write may come between

    def _make_first_state(self) -> None:
        """Of an optimizer that has nothing but steps."""
        if not self._open and not any("exp_avg" in self.state_at_rest(p) for p in self._everyone()):
            self._make_state()

    def _refuse_converted(self, named: list[tuple[str, Tensor]]) -> None:
        """ValueError where a parameter is no longer what its state was made for."""
        known = [(name, p, self._forms[p]) for name, p in named if p in self._forms]
        param_form.refuse_converted(
            (name, p, form) for name, p, form in known if not form.fits(p) and form.is_of(self.state_at_rest(p))
        )

    def _forms_to_keep(self) -> dict[Tensor, param_form.Form]:
        """For a pickle or a copy, which has states of its own."""
        return {p: form._replace(exp_avg=None) for p, form in self._forms.items() if form.is_of(self.state_at_rest(p))}

    def _note_forms(self, params: Iterable[Tensor]) -> None:
        """Their states are right for them as they are now; where a pickle says what they are for, for that."""
        for p in params:
            moment, form = self.state_at_rest(p).get("exp_avg"), self._forms.get(p)
            if moment is None:
                self._forms.pop(p, None)
            elif form is not None and form.exp_avg is None:
                self._forms[p] = form._replace(exp_avg=weakref.ref(moment))
            else:
                self._forms[p] = param_form.form_of(p, moment)

    def state_at_rest(self, p: Tensor) -> Mapping[str, Any]:
        """The state of p, wherever it lies; empty where there is none."""
        return self._host.peek(p, access.peek(self.state, p))

    def on_host(self, everyone: list[Tensor]) -> list[bool]:
        """Which parameters are stepped on the host."""

        def size(i: int) -> int:
            p = everyone[i]
            if not p.requires_grad and "exp_avg" not in self.state_at_rest(p):
                return 0
            return codec.nbytes(locals_.of(i).weight, codec.kinds_of(self.policy, p.dtype))

        locals_ = self.current_shards(everyone)
        return self._host.choose(len(everyone), size)

    def _refuse_open(self, doing: str) -> None:
        if self._open:
            raise RuntimeError(f"{doing} within master_weights(): parameters are their masters there; leave it first")
