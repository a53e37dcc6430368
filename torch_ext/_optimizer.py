"""AdamW and Adam: torch.optim.Optimizer on the outside, one adamw_flat_ call per step on the inside."""

import contextlib
import functools
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor

from torch_ext import (
    _away,
    _checkpoint,
    _groups,
    _kept,
    _loading,
    _local,
    _master_access,
    _masters,
    _refusals,
    _registry,
    _state,
    _tensors,
)
from torch_ext._clip import Clipping, innermost, is_agreed, measure
from torch_ext._early import Early
from torch_ext._groups import Params
from torch_ext._host_part import HostPart
from torch_ext._masters import Seen
from torch_ext._plan import Chunk, Member, Plan, gather_of, gathers_in_order, run
from torch_ext._policy import Policy

if TYPE_CHECKING:
    from torch_ext._exchange import Handle

_ON_EXTERNAL_WRITE = ("resync", "error", "ignore")
# Our own attributes that a pickled or copied optimizer keeps; lists made from tensors are made again.
_KEPT = ("policy", "skip_nonfinite", "on_external_write", "_counts", "_host")


Method = TypeVar("Method", bound=Callable[..., Any])


def _of_the_innermost(method: Method) -> Method:
    """Lightning's wrapper has our methods, but writes of its own, which the step would never see: called on it, the
    method is called on the optimizer inside."""

    @functools.wraps(method)
    def called(self: Any, *args: Any, **options: Any) -> Any:
        return method(innermost(self), *args, **options)

    return cast(Method, called)


class Adam(torch.optim.Optimizer):
    """Adam (Kingma & Ba 2015) with torch.optim.Adam's arguments and state_dict, in the dtypes of a policy.

    The step is one fused pass over memory whatever `fused` and `foreach` say; `capturable` is accepted; `amsgrad` and
    `differentiable` are refused. params: parameters, named parameters or groups, as torch takes them. Keyword-only, and
    beyond torch's:

    policy: of `load_policy`; None: that of the dtype of most trainable elements. Parameters in other dtypes follow
    their
        own row of it.
    moment_rounding: "dithered", "stochastic" or "nearest": how moments are brought to 16 or 8 bits. None: the policy's.
    weight_rounding: the same for a 16-bit weight without a master.
    seed: of the rounding thresholds; saved with the state.
    skip_nonfinite: True: a step with a non-finite gradient is left out and counted, at the price of one more read of
    the
        gradients where nothing else has read them (a clip, a loss scale).
    on_external_write: what to do where a weight is not what its master rounds to, because somebody else wrote it:
        "resync" (the master becomes the weight), "error", or "ignore" (the master overwrites the weight). A write is
        noticed by the parameter's version counter and address, by the identity of its master, and by what the weights
        are: beside fp32 masters in a sample of 32 in every 2048 elements, beside remainders in all of them (there a
        block of 1024 is taken over at a time). What is not seen is a write through `p.data`, numpy or a storage to
        fewer than 2048 neighbours beside fp32 masters: call `resync_masters()` after it.
    offload_fraction: in [0, 1]: the share of the bytes of states and masters that lies on the host, where its
        parameters are stepped while the device steps the others: gradients are copied down and weights up beside both.
        Whole parameters, or this rank's parts of them: the largest first, as long as they fit, so that the share is off
        by half of the smallest one left out at most; 0 and 1 are exact. The weights, and everything this optimizer
        returns and takes, are the same for every fraction; what lies on the host is not in `opt.state`, which has its
        step only. With step_in_backward buckets of which a part is on the host are left to step().
    """

    _decoupled: bool | None = None  # None: the group says

    # Derived from parameters, state and groups; None or empty where it has to be made again.
    _plan: Plan | None
    _hyper: tuple[list[Any], _groups.Hyper] | None
    _seen: dict[Tensor, Seen]
    _clipping: Clipping | None
    _consolidated: dict[str, Any] | None  # handed out by the next state_dict(), until the next step
    _locals: _local.Locals | None
    _early: Early
    _open: bool  # within master_weights()
    _warned: bool

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        policy: Policy | None = None,
        moment_rounding: str | None = None,
        weight_rounding: str | None = None,
        seed: int = 0,
        skip_nonfinite: bool = False,
        on_external_write: str = "resync",
        offload_fraction: float = 0.0,
    ) -> None:
        if policy is not None and not isinstance(policy, Policy):
            raise TypeError(f"policy is a {type(policy).__name__}; what torch_ext.load_policy returns is legal")
        if on_external_write not in _ON_EXTERNAL_WRITE:
            raise ValueError(f"on_external_write is {on_external_write!r}; {', '.join(_ON_EXTERNAL_WRITE)} are legal")
        if not isinstance(params, Tensor):  # torch says what is wrong with a single tensor
            params = cast(Params, list(params))
        self.policy = _groups.policy_of(params) if policy is None else policy
        self.skip_nonfinite = skip_nonfinite
        self.on_external_write = on_external_write
        self._host = HostPart(offload_fraction)
        self._forget()
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
            "decoupled_weight_decay": decoupled_weight_decay,
            "moment_rounding": self.policy.moment_rounding if moment_rounding is None else moment_rounding,
            "weight_rounding": self.policy.weight_rounding if weight_rounding is None else weight_rounding,
            "seed": seed,
        }
        _groups.refuse(defaults, "")
        super().__init__(params, defaults)
        self.state = _kept.Kept.of(self.state, handed_out=False)
        device = next((p.device for p in self._everyone() if p.requires_grad), torch.device("cpu"))
        # Steps skipped, elements whose master became the weight: by the first call of the operator in a step, by others
        # (which skip the same step once more).
        self._counts = torch.zeros(2, 2, dtype=torch.int64, device=device)

    # -- parameters ---------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. Refused, with what to do about it: parameters that are twice in it or share memory, complex,
        sparse, meta and inference tensors, other dtypes than float32, bfloat16 and float16."""
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
        _groups.fill(group, {}, self._decoupled)
        self._make_steps(group)
        self._plan = None

    def _admit(self, group: dict[str, Any], where: str) -> None:
        _groups.refuse(group, where)
        _groups.refuse_differing(group, self.param_groups[0], where)
        names = _groups.names(self.param_groups)
        trained = [(p, name) for p, name in zip(self._everyone(), names, strict=True) if p.requires_grad]
        for p, name in trained:
            _tensors.refuse_param(_local.tensor_of(p), name)
            _state.kinds_of(self.policy, p.dtype)
        devices = {p.device: name for p, name in trained}
        if len(devices) > 1:
            places = " and ".join(f"{name} on {device}" for device, name in devices.items())
            raise ValueError(f"parameters are on several devices ({places}); make one optimizer per device")
        _tensors.refuse_overlap([_local.tensor_of(p) for p, _ in trained], [name for _, name in trained])

    def _make_steps(self, group: dict[str, Any]) -> None:
        """The steps of a group as views of one tensor; zero for trainable parameters that have none."""
        counted = [p for p in group["params"] if p.requires_grad or "step" in _kept.peek(self.state, p)]
        if counted:
            steps = torch.zeros(len(counted), dtype=torch.float32, device=counted[0].device).unbind()
            for p, step in zip(counted, steps, strict=True):
                entry = _kept.entry(self.state, p)
                if "step" in entry:
                    step.fill_(float(entry["step"]))
                entry["step"] = step

    def _everyone(self) -> list[Tensor]:
        return _groups.everyone(self.param_groups)

    # -- the step -----------------------------------------------------------------------------------------------------

    @torch.compiler.disable
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; returns the closure's loss, if there is a closure.

        Parameters without a gradient are left alone. Raises RuntimeError where a gradient or a parameter is not what
        the operator takes, naming it; nothing has been written then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            for owner in _registry.owners_of(self._everyone()):
                owner.before_step()
        with torch.no_grad():
            self._step()
        return loss

    def _step(self) -> None:
        self._refuse_open("step()")
        everyone = [p for group in self.param_groups for p in group["params"]]
        grads = self._current_locals(everyone).grads()
        self._consolidated = None
        self._refuse_scaler()
        active = [g is not None for g in grads]
        present = cast(list[Tensor], grads) if all(active) else [g for g in grads if g is not None]
        if not present:
            self._warn_of_orphans()
            return
        hyper = self._current_hyper()
        clipping = self._current_clipping(present, active)
        if self._early:
            fits = self._plan is not None and self._plan.fits(everyone, active, self.state)
            self._early.refuse_otherwise(
                fits, clipping is not None or not {"grad_scale", "found_inf"}.isdisjoint(vars(self))
            )
        for again in (False, True):
            plan = self._plan
            if again or plan is None or not plan.fits(everyone, active, self.state):
                plan = self._make_plan(everyone, active, present)
                if plan is None:
                    return
            scalars = self._scalars(clipping)
            try:
                if plan.host is not None:
                    external = _masters.MODES[self.on_external_write]
                    sample = self.on_external_write != "ignore"
                    plan.host.begin(plan.theirs(present), hyper, scalars, sample=sample, external=external)
                self._notice_writes(plan)
                plan.load_copies()
                self._run(plan, plan.lay_out(plan.own(present), always=again), hyper, scalars)
            except _Refused as refusal:
                # It wrote nothing. Once more: parameters or gradients may only lie differently than they did so far.
                if again:
                    raise RuntimeError(str(refusal)) from None
            else:
                plan.store_copies()
                torch.autograd.graph.increment_version(plan.params)
                plan.look()
                if clipping is not None:
                    clipping.used = True
                    clipping.warn_if_skipped(plan.everybody, present)
                return
            finally:
                if plan.host is not None:
                    plan.host.end()

    def _warn_of_orphans(self) -> None:
        """A module that loads with assign=True, or is made anew, has other parameters: nobody trains these."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"torch_ext: step() found no gradient for any of {len(self._everyone())} parameters, so nothing was "
                "stepped. If the model's parameters were replaced after this optimizer was made (load_state_dict(assign="
                "True), to_empty(), a copy of the model), make it from the new ones",
                stacklevel=4,
            )

    def _refuse_open(self, doing: str) -> None:
        if self._open:
            raise RuntimeError(f"{doing} within master_weights(): parameters are their masters there; leave it first")

    def _run(
        self, plan: Plan, grads: list[Tensor], hyper: _groups.Hyper, scalars: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        """The operator, on each chunk; weights travel while later chunks are stepped, and are there afterwards."""
        external = _masters.MODES[self.on_external_write]
        if self.on_external_write == "error":
            self._refuse_written(plan, grads, hyper, scalars)
        row = 0  # of the counters: a step that is skipped is counted once
        under_way: list[Handle] = []

        def step_own(chunk: Chunk) -> None:
            nonlocal row
            try:
                if chunk.gather not in self._early:
                    run(plan, chunk, chunk.of(grads), hyper, (*scalars, self._counts[row]), external)
            except RuntimeError as refusal:
                if row or under_way:  # what was stepped already must not be stepped once more
                    raise RuntimeError(_named(str(refusal), plan, chunk)) from None
                raise _Refused(_named(str(refusal), plan, chunk)) from None
            if chunk.weights:
                row = 1

        if plan.host is not None:  # the device has all of its own to do while the host does its part
            for chunk in plan.chunks:
                step_own(chunk)
        for chunk in plan.chunks:
            if plan.host is None:
                step_own(chunk)
            else:
                plan.host.step(chunk.gather)
            if chunk.gather is not None:
                owner, bucket = chunk.gather
                under_way.append(owner.gather(bucket))
        for handle in under_way:
            handle.result()
        self._early.clear()
        if plan.host is not None:
            self._counts[1, 1] += plan.host.resynced
            self._counts[0, 0] += int(plan.host.skipped and row == 0)

    def _notice_writes(self, plan: Plan) -> None:
        """What counters, addresses and identities tell; what only the weights themselves do, the operator sees."""
        if self.on_external_write == "ignore":
            return
        suspects = plan.suspects()
        if plan.host is not None:
            suspects += plan.host.suspects()
        if self.on_external_write == "error":
            _masters.refuse_written(suspects)
        elif suspects:
            self._counts[1, 1] += _masters.resync(suspects).sum()

    def _refuse_written(
        self, plan: Plan, grads: list[Tensor], hyper: _groups.Hyper, scalars: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        """RuntimeError where the operator finds weights that somebody else wrote; nothing is stepped."""
        if plan.host is not None:
            _masters.refuse_written([m for m in plan.host.members if m.kinds.master == "master_remainder"])
        for chunk in plan.chunks:
            try:
                run(plan, chunk, chunk.of(grads), hyper, (*scalars, _tensors.NONE), _masters.CHECK)
            except RuntimeError as refusal:
                _masters.refuse_written([m for m in plan.members if m.kinds.master])
                raise _Refused(_named(str(refusal), plan, chunk)) from None

    def begin_early(self, owner: _registry.Owner) -> Callable[[int], None] | None:
        """See _registry.Stepper: buckets are stepped as their sums come, with what groups say now; step() gathers."""
        if self.skip_nonfinite:
            raise RuntimeError("step_in_backward=True steps before skip_nonfinite=True can look: leave out one of them")
        self._early.refuse_again()
        everyone = self._everyone()
        self._current_locals(everyone)
        plan = self._plan
        if plan is None or not all(plan.active) or not plan.fits(everyone, plan.active, self.state):
            return None
        with torch.no_grad():
            self._notice_writes(plan)
            if self.on_external_write == "error":
                _masters.refuse_written([m for m in plan.members if m.kinds.master])
        external = _masters.MODES[self.on_external_write]
        return self._early.begin(owner, plan, self._current_hyper(), self._counts[1], external)

    def stepped_early(self) -> bool:
        """See _registry.Stepper."""
        return bool(self._early)

    def refuse_moving(self, doing: str) -> None:
        """RuntimeError where memory of parameters or states must stay (see _offload)."""
        self._refuse_open(doing)

    def stays(self) -> Iterable[Tensor]:
        """States that live on the host, and do not move."""
        return self._host.tensors()

    def set_aside(self, grads: bool) -> None:
        """Memory went to the host (see _offload), that of gradients among it or not: nothing holds any more that was
        made for what it contained."""
        if self._plan is not None:
            self._seen.update(self._plan.seen())
            self._plan = None
        if grads:
            self._clipping = None

    # -- arguments ----------------------------------------------------------------------------------------------------

    def _refuse_scaler(self) -> None:
        """RuntimeError where somebody looked for overflow in `.grad`, which is not what is stepped."""
        assert self._locals is not None
        found_inf = self.__dict__.get("found_inf")
        if found_inf is not None and self._locals.sharded and not is_agreed(found_inf):
            for name in ("grad_scale", "found_inf"):
                self.__dict__.pop(name, None)
            raise RuntimeError(_refusals.FOREIGN_SCALER)

    def _current_locals(self, everyone: list[Tensor]) -> _local.Locals:
        """Where this rank's parts of the parameters are."""
        _away.refuse_optimizer(self, everyone)
        if self._locals is None or not self._locals.fits(everyone, _registry.generation):
            self._locals = _local.Locals(everyone, list(map(_registry.owner_of, everyone)), _registry.generation)
            self._plan = None
        return self._locals

    def _present_grads(self) -> list[Tensor]:
        """The gradients that a step would read now."""
        return [g for g in self._current_locals(self._everyone()).grads() if g is not None]

    def _make_plan(self, everyone: list[Tensor], active: list[bool], grads: list[Tensor]) -> Plan | None:
        """The argument lists of this step, state included; None for a step that is inert."""
        if self._plan is not None:
            self._seen.update(self._plan.seen())
            self._plan = None
        present = set(everyone)
        for gone in [p for p in self.state if isinstance(p, Tensor) and p not in present]:
            dict.pop(self.state, gone)
        self._host.gone(present)
        self._seen = {p: seen for p, seen in self._seen.items() if p in present}
        first = not any("exp_avg" in self._at_rest(p) for p in everyone)
        # DCP calls step with lr 0 and zero gradients to have state made: that is no step (a counter at 1 would make the
        # first real update 1.34 times too small).
        inert = first and all(float(g["lr"]) == 0 for g in self.param_groups) and self._all_zero(grads, active)
        members = self._members(everyone, active)
        if inert:
            self._seen.clear()  # whatever is written before the first step shall be noticed
            return None
        owners = [owner for owner, there in zip(self._current_locals(everyone).owners, active, strict=True) if there]
        gathers = [gather_of(member, owner) for member, owner in zip(members, owners, strict=True)]
        order = gathers_in_order(gathers)
        own = [i for i, member in enumerate(members) if not member.host]
        self._plan = Plan(
            [members[i] for i in own],
            everyone,
            active,
            self.state,
            [grads[i] for i in own],
            self._seen,
            [gathers[i] for i in own],
            order,
        )
        self._plan.share(members, self._host.plan(members, gathers, order, self._seen))
        for owner in set(owners):
            if owner is not None:
                owner.offer(self)
        return self._plan

    def _all_zero(self, grads: list[Tensor], active: list[bool]) -> bool:
        """On every rank that holds a part of them."""
        something = torch.zeros(1)
        if any(bool(g.any()) for g in grads):
            something.fill_(1)
        assert self._locals is not None
        something = something.to(grads[0].device)
        for group in dict.fromkeys(group for part in self._locals.parts(active) for group in part.groups):
            torch.distributed.all_reduce(something, op=torch.distributed.ReduceOp.MAX, group=group)
        return not bool(something)

    def _members(self, everyone: list[Tensor], wanted: list[bool]) -> list[Member]:
        """The wanted parameters, with state that is made where it is missing."""
        names, ids = _groups.names(self.param_groups), _groups.ids(self.param_groups)
        group_of = [g for g, group in enumerate(self.param_groups) for _ in group["params"]]
        chosen = [i for i, want in enumerate(wanted) if want]
        locals_ = self._current_locals(everyone)
        local = {i: locals_.of(i) for i in chosen}
        for i in chosen:  # all of them before the first state is made
            _tensors.refuse_param(local[i].weight, names[i])
        on_host = self._on_host(everyone)
        members = [
            Member(
                everyone[i],
                local[i],
                self._host.entry(self.state, everyone[i], on_host[i]),
                _state.kinds_of(self.policy, everyone[i].dtype),
                ids[i],
                group_of[i],
                names[i],
                on_host[i],
            )
            for i in chosen
        ]
        for host in (False, True):  # not in one memory, which may leave the device (see _offload)
            missing = [m for m in members if m.host == host and not _state.complete(m.state, m.kinds)]
            for m, made in zip(missing, _state.make([(m.beside, m.kinds) for m in missing]), strict=True):
                m.state.update({key: value for key, value in made.items() if key not in m.state})
                if m.kinds.master is not None:
                    self._seen[m.param] = _masters.look(m)
        for m in members:
            if "step" not in m.state:
                m.state["step"] = torch.zeros((), dtype=torch.float32, device=m.weight.device)
            _state.settle(m.weight.detach(), m.state, m.kinds, m.name)
        return members

    def _at_rest(self, p: Tensor) -> Mapping[str, Any]:
        """The state of p, wherever it lies; empty where there is none."""
        return self._host.peek(p, _kept.peek(self.state, p))

    def _on_host(self, everyone: list[Tensor]) -> list[bool]:
        """Which parameters are stepped on the host."""

        def size(i: int) -> int:
            p = everyone[i]
            if not p.requires_grad and "exp_avg" not in self._at_rest(p):
                return 0
            return _state.nbytes(locals_.of(i).weight, _state.kinds_of(self.policy, p.dtype))

        locals_ = self._current_locals(everyone)
        return self._host.choose(len(everyone), size)

    def _current_hyper(self) -> _groups.Hyper:
        key = _groups.key_of(self.param_groups)
        if self._hyper is None or self._hyper[0] != key:
            self._hyper = (key, _groups.hyper(self.param_groups))
        return self._hyper[1]

    def _scalars(self, clipping: Clipping | None) -> tuple[Tensor, Tensor, Tensor]:
        """grad_scale, clip_coef, found_inf; the first and the last are attributes that GradScaler sets for one step."""
        grad_scale = _one(self.__dict__.get("grad_scale"), self._counts.device)
        found_inf = _one(self.__dict__.get("found_inf"), self._counts.device)
        if clipping is None:
            return grad_scale, _tensors.NONE, found_inf
        both = clipping.found_inf if found_inf.numel() == 0 else found_inf + clipping.found_inf
        return grad_scale, clipping.clip_coef, both

    def skipped_steps(self) -> int:
        """Steps left out because a gradient was not finite, since the optimizer was made. Waits for the device."""
        return int(self._counts[0, 0])

    def external_writes(self) -> int:
        """Elements of this rank whose masters became their weights because somebody else had written to these, since the
        optimizer was made; in whole blocks of 1024 beside remainders. What `resync_masters` did is not in it. Waits for
        the device."""
        return int(self._counts[:, 1].sum())

    @property
    def unscales_in_step(self) -> bool:
        """Whether policy.grad_scaler() leaves gradients as they are until the step; not with fused=False."""
        return self.defaults["fused"] is not False

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether torch.amp.GradScaler leaves unscaling to the step; frameworks that clip refuse to where it does.

        As of torch's optimizers with fused=True. And where its unscale_ refuses to: of gradients in fp16.
        """
        fused = self.defaults["fused"]
        if fused is not None:
            return bool(fused)
        trained = [p for p in self._everyone() if p.requires_grad]
        return any((p if p.grad is None else p.grad).dtype == torch.float16 for p in trained)

    # -- clipping -----------------------------------------------------------------------------------------------------

    def _clip(self, max_norm: float) -> Clipping:
        """Measures the gradients; the next step multiplies by the coefficient. `torch_ext.clip_grad_norm_` calls it."""
        self._early.refuse_clipping()
        everyone = self._everyone()
        _away.grads.refuse(everyone, "clip_grad_norm_()")
        for owner in _registry.owners_of(everyone):
            owner.before_step()
        found = self._current_locals(everyone).grads()
        grads = [g for g in found if g is not None]
        self._clipping = self._measure(grads, [g is not None for g in found], max_norm)
        self._clipping.attach(grads)
        return self._clipping

    def _measure(self, grads: list[Tensor], active: list[bool], max_norm: float) -> Clipping:
        grad_scale = _one(self.__dict__.get("grad_scale"), self._counts.device)
        assert self._locals is not None
        self._locals.refuse_mixed()
        return measure(grads, max_norm, grad_scale, None if self._locals.plain else self._locals.parts(active))

    def _current_clipping(self, grads: list[Tensor], active: list[bool]) -> Clipping | None:
        """The clipping that these gradients were given, or the check that skip_nonfinite asks for."""
        clipping = self._clipping
        if clipping is not None and clipping.belongs_to(grads):
            return clipping
        self._clipping = None
        assert self._locals is not None
        # Whoever clips sharded gradients by a function of their own clips by this rank's norm.
        if self.policy.clip_grad and not self._locals.plain:
            return self._measure(grads, active, self.policy.clip_grad)
        if self.skip_nonfinite and "found_inf" not in self.__dict__:
            return self._measure(grads, active, math.inf)
        return None

    @_of_the_innermost
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's, shards of gradients included. A clip coefficient that no step has applied is forgotten."""
        self._clipping = None
        if self._early and self._plan is not None:
            self._early.end(self._plan)
        everyone = self._everyone()
        for owner in _registry.owners_of(everyone):
            owner.zero_grad(everyone)
        super().zero_grad(set_to_none)

    # -- masters ------------------------------------------------------------------------------------------------------

    @_of_the_innermost
    def resync_masters(self, state_dict: Mapping[str, Any] | None = None, force: bool = False) -> int:
        """Compares every master with its weight and makes it the weight where it no longer rounds to it.

        For weights that were written where nobody can notice (see on_external_write). 16-bit remainders are legal beside
        any weight: they are dropped in blocks of 1024 weights of which one was written. force: every master becomes
        exactly its weight, remainders included.

        state_dict: a model's in higher precision, from which the weights that are there now were rounded (load it into
        the model first). Masters are taken from it, by parameter name: what rounding to the weight lost is kept.
        ValueError or TypeError, naming the parameter, where it does not fit; nothing has changed then.

        Returns the number of elements that changed, of this rank.
        """
        if state_dict is not None and force:
            raise ValueError("resync_masters(): force=True takes masters from the weights, state_dict from elsewhere")
        self._refuse_open("resync_masters()")
        everyone = self._everyone()
        at_rest = [self._at_rest(p) for p in everyone]
        having = ["master_param" in state or "master_remainder" in state for state in at_rest]
        if state_dict is not None:  # masters are made where they are still to come
            having = [p.requires_grad and _state.kinds_of(self.policy, p.dtype).master is not None for p in everyone]
        with torch.no_grad():
            members = self._members(everyone, having)
            if state_dict is None:
                changed = int(_masters.resync(members, force).sum())
            else:
                changed = _master_access.seed(members, self._keys(having), state_dict)
        self._masters_known(members)
        return changed

    @_of_the_innermost
    @contextlib.contextmanager
    def master_weights(self) -> Iterator[dict[str | int, Tensor]]:
        """Full precision while the block runs (under no_grad): to constrain weights, average them, or read them.

            with opt.master_weights() as masters:
                for p in model.parameters(): p.clamp_(-1, 1)

        Each parameter that has a master *is* its master (fp32) then, and afterwards becomes its nearest in the model's
        dtype again. `masters` has the same tensors by parameter name (position where names are not known): of
        parameters that are cut over the ranks, which stay as they are, this rank's part, and DTensors' local tensors;
        what is written there is taken over as well. Where parameters are cut every rank enters, and leaving is
        collective. A step inside is a RuntimeError.
        """
        self._refuse_open("master_weights()")
        everyone = self._everyone()
        with torch.no_grad():
            trained = [p.requires_grad for p in everyone]
            members = self._members(everyone, trained)
            _masters.resync([m for m in members if m.kinds.master])
            self._open = True
            try:
                with _master_access.opened(members, self._keys(trained)) as masters:
                    yield masters
            finally:
                self._open = False
                self._masters_known([m for m in members if m.kinds.master])

    def _keys(self, wanted: list[bool]) -> list[str | int]:
        return [key for key, want in zip(_groups.keys(self.param_groups), wanted, strict=True) if want]

    def _masters_known(self, members: list[Member]) -> None:
        """To be what their weights are the nearest of."""
        self._seen.update({m.param: _masters.look(m) for m in members})
        self._plan = None

    # -- saving and loading -------------------------------------------------------------------------------------------

    @_of_the_innermost
    @torch.compiler.disable
    def state_dict(self) -> dict[str, Any]:
        """torch's format: step, exp_avg, exp_avg_sq by parameter, and master_param (fp32) where there is a master.

        Logical tensors: 8-bit and 16-bit scaled moments are decoded, masters reconstructed; what is logical at rest is
        handed out as it is, what is not is decoded where it is read: until then it goes with the training. State that
        does not exist yet is made, zero, which moves no weight and no counter.

        Never collective. Of DTensors state is DTensors; where parameters are cut over the ranks (strategies optim and
        optim_grads) it is tensors of the parameter's shape of which this rank has its part: for
        torch.distributed.checkpoint, which saves and loads them under any strategy and number of ranks. Whatever needs
        whole tensors of them (torch.save, arithmetic) raises RuntimeError that names `consolidate_state_dict`.
        """
        self._refuse_open("state_dict()")
        if self._consolidated is not None:
            whole, self._consolidated = self._consolidated, None
            return whole
        return self._logical_state_dict()

    @_of_the_innermost
    @torch.compiler.disable
    def master_state_dict(self) -> dict[str | int, Any]:
        """What is trained, in full precision: of each parameter the fp32 master, or the weight where it is its own.

        By parameter name; by position where the optimizer does not know names. Tensors as those of `state_dict()`, to
        be read, not written.
        """
        return _checkpoint.masters(self, self._logical_state_dict())

    @_of_the_innermost
    @torch.compiler.disable
    def consolidate_state_dict(self, to: int | None = 0) -> dict[str, Any] | None:
        """`state_dict()` of whole tensors, put together from all ranks' parts, with the bits of an optimizer that is
        not sharded. Collective: every rank of the parameters' process groups calls it.

        to: the global rank that gets it, the others get None; None: every rank gets it. One parameter at a time, so a
        rank that gets nothing needs memory for one more parameter only. Where states are cut the next `state_dict()`,
        if it comes before the next step, hands out the same once more, as of torch's ZeroRedundancyOptimizer: so
        frameworks save that know of it (Lightning).
        """
        whole = _checkpoint.consolidated(self, self._logical_state_dict(), to)
        self._consolidated = whole if self._current_locals(self._everyone()).cut else None
        return whole

    def _logical_state_dict(self) -> dict[str, Any]:
        """Of this rank's parts."""
        with torch.no_grad():
            everyone = self._everyone()
            known = dict(self._seen)
            self._members(everyone, [p.requires_grad or "exp_avg" in self._at_rest(p) for p in everyone])
            self._seen = known  # what was made now is checked before the first step: a silent write may come between
        handle = self.register_state_dict_post_hook(
            cast(Any, _checkpoint.logical), prepend=True
        )  # before everybody else's
        try:
            return super().state_dict()
        finally:
            handle.remove()

    @_of_the_innermost
    @torch.compiler.disable
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` of this class or of torch.optim.AdamW returned, under any policy.

        Masters are not rounded to the parameter's dtype; a missing master is seeded from the weight. What the policy
        keeps less of than was saved, and masters that were missing, are named in one warning. Moves no weight: a master
        that does not round to its weight at the next step becomes the weight (see on_external_write), so model and
        optimizer may be loaded in any order. Raises ValueError or TypeError, naming the parameter and the key, before
        anything has changed.
        """
        self._refuse_open("load_state_dict()")
        handle = self.register_load_state_dict_pre_hook(cast(Any, _loading.sealed))  # after everybody else's
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def __getstate__(self) -> dict[str, Any]:
        _away.refuse_states(self, "an optimizer is pickled or copied")
        return super().__getstate__() | {key: self.__dict__[key] for key in _KEPT if key in self.__dict__}

    def __setstate__(self, state: dict[str, Any]) -> None:
        before, entries = self.__dict__.get("state", {}), state["state"]
        loaded = all(isinstance(value, _loading.Sealed) for value in entries.values())
        if loaded and before:
            self._host.forget_all()
        for key, value in entries.items():
            if isinstance(value, _loading.Sealed):
                entries[key] = self._host.put(key, value.at_rest) if value.host else value.at_rest
        super().__setstate__(state)
        if not isinstance(entries, _kept.Kept):  # a shallow copy of an optimizer shares its state
            # What was loaded is ours alone, unless it was handed out by us before.
            self.state = _kept.Kept.of(entries, handed_out=not loaded or (bool(before) and _kept.handed_out(before)))
        self._forget()
        for group in self.param_groups:
            _groups.fill(group, self.defaults, self._decoupled)
            self._make_steps(group)

    def _forget(self) -> None:
        self._plan = None
        self._hyper = None
        self._seen = {}
        self._clipping = None
        self._consolidated = None
        self._locals = None
        self._early = Early()
        self._open = False
        self._warned = False


class AdamW(Adam):
    """AdamW (Loshchilov & Hutter 2019) with torch.optim.AdamW's arguments and state_dict, in the dtypes of a policy.

    See Adam for the arguments.
    """

    _decoupled = True

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        policy: Policy | None = None,
        moment_rounding: str | None = None,
        weight_rounding: str | None = None,
        seed: int = 0,
        skip_nonfinite: bool = False,
        on_external_write: str = "resync",
        offload_fraction: float = 0.0,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=True,
            policy=policy,
            moment_rounding=moment_rounding,
            weight_rounding=weight_rounding,
            seed=seed,
            skip_nonfinite=skip_nonfinite,
            on_external_write=on_external_write,
            offload_fraction=offload_fraction,
        )


class _Refused(Exception):
    """The operator took no argument and wrote nothing."""


def _one(value: Any, device: torch.device) -> Tensor:
    """A scalar that somebody set as a tensor, a number or not at all, as an fp32 tensor of one element or none."""
    if value is None:
        return _tensors.NONE
    return torch.as_tensor(value, dtype=torch.float32, device=device)


def _named(message: str, plan: Plan, chunk: Chunk) -> str:
    """The operator's message, with the parameter it speaks of."""
    found = re.search(r"\b(params|grads|exp_avgs|exp_avg_sqs|masters|scales|steps|meta|witnesses)\[(\d+)\]", message)
    if found is None or int(found[2]) >= len(chunk.weights):
        return message
    index = int(found[2]) if chunk.rows is None else chunk.rows[int(found[2])]
    return f"{message} (index {found[2]} is {plan.members[index].name})"
