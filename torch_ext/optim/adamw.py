"""AdamW and Adam: torch.optim.Optimizer on the outside, one adamw_flat_ call per step on the inside."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from torch_ext.grads import clipped
from torch_ext.native.untraced import untraced
from torch_ext.optim import torch_clip_functions
from torch_ext.optim.state import access, codec, load, save
from torch_ext.optim.state import master_weights as state_master_weights
from torch_ext.optim.state import masters as state_masters
from torch_ext.optim.state.param_state import ParamState
from torch_ext.optim.stepper import Stepper
from torch_ext.params import hyper_parameters, param_groups
from torch_ext.params.hyper_parameters import BETAS, DECAY, EPS, LR, NO_DECAY, start
from torch_ext.params.param_groups import Params, of_the_innermost
from torch_ext.policy.policy import Policy
from torch_ext.tensors import offload_guard

# Our own attributes that a pickled or copied optimizer keeps; lists made from tensors are made again.
_KEPT = ("policy", "skip_nonfinite", "on_external_write", "_counts", "_host")


class Adam(Stepper):
    """Adam (Kingma & Ba 2015) with torch.optim.Adam's arguments and state_dict, in the dtypes of a policy.

    The step is one fused pass over memory whatever `fused` and `foreach` say; `capturable` is accepted; `amsgrad` and
    `differentiable` are refused. params: parameters, named parameters or groups, as torch takes them. Keyword-only, and
    beyond torch's:

    lr: a number, or a tensor of one element. A step that is captured into a CUDA graph (after one that was not, which
        makes the state) takes tensors on the device, one for each group, whose values of the moment count in every
        replay; a number there is refused. All else (betas, eps, weight_decay, seed, the norm that gradients are clipped
        to) stays in every replay what it was in the capture.
    policy: of `load_policy`; None: that of the dtype of most trainable elements. Parameters in other dtypes follow
        their own row of it. What was set explicitly in it of lr, weight_decay, adam_beta1, adam_beta2 and adam_eps is
        what this optimizer starts from, unless an argument or a group says otherwise; its defaults are not. Where
        clip_grad is set, step() clips by it: gradients that nobody clipped since the last step or zero_grad, by
        `torch_ext.clip_grad_norm_` or one of torch.nn.utils' functions (measuring with math.inf is no clipping). Where
        `optimizer` is set it must be this one: "adam" fits AdamW, too, as with Megatron-LM.
    moment_rounding: "dithered", "stochastic" or "nearest": how moments are brought to 16 or 8 bits. None: the policy's.
    weight_rounding: the same for a 16-bit weight without a master.
    seed: of the rounding thresholds; saved with the state.
    skip_nonfinite: True: a step with a non-finite gradient is left out and counted, at the price of one more read of
        the gradients where nothing else has read them (a clip, a loss scale).
    on_external_write: what to do where a weight is not what its master rounds to, because somebody else wrote it:
        "resync" (the master becomes the weight), "error", or "ignore" (the master overwrites the weight). A write is
        noticed by the parameter's version counter and address, by its master's identity and version counter, and by
        what the weights are: beside fp32 masters in a sample of 32 in every 2048 elements, beside remainders in all of
        them (there a block of 1024 is taken over at a time). What is not seen is a write through `p.data`, numpy or a
        storage to fewer than 2048 neighbours beside fp32 masters: call `resync_masters()` after it. So it is the weight
        that counts: masters are written within `master_weights()`.
    offload_fraction: in [0, 1]: the share of the bytes of states and masters that lies on the host, where its
        parameters are stepped while the device steps the others: gradients are copied down and weights up beside both.
        Whole parameters, or this rank's parts of them: the largest first, as long as they fit, so that the share is off
        by half of the smallest one left out at most; 0 and 1 are exact. The weights, and everything this optimizer
        returns and takes, are the same for every fraction; what lies on the host is not in `opt.state`, which has its
        step only. With step_in_backward buckets of which a part is on the host are left to step().
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = LR,
        betas: tuple[float | Tensor, float | Tensor] = BETAS,
        eps: float = EPS,
        weight_decay: float = NO_DECAY,
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
        params = param_groups.taken(params)
        policy = param_groups.policy_of(params) if policy is None else policy
        decouples = bool(self._decoupled or decoupled_weight_decay)
        hyper_parameters.refuse_optimizer(policy, ("adam", "adamw") if decouples else ("adam",), type(self).__name__)
        defaults = {
            "lr": start(lr, policy, "lr"),
            "betas": hyper_parameters.start_betas(betas, policy),
            "eps": start(eps, policy, "adam_eps"),
            "weight_decay": start(weight_decay, policy, "weight_decay"),
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
            "decoupled_weight_decay": decoupled_weight_decay,
            "moment_rounding": policy.moment_rounding if moment_rounding is None else moment_rounding,
            "weight_rounding": policy.weight_rounding if weight_rounding is None else weight_rounding,
            "seed": seed,
        }
        super().__init__(params, defaults, policy, offload_fraction, skip_nonfinite, on_external_write)

    def _forget(self) -> None:
        super()._forget()
        if self.policy.clip_grad:
            torch_clip_functions.route()
            clipped.watch(self)

    # -- masters ------------------------------------------------------------------------------------------------------

    @of_the_innermost
    def resync_masters(self, state_dict: Mapping[str, Any] | None = None, force: bool = False) -> int:
        """Compares every master with its weight and makes it the weight where it no longer rounds to it.

        For weights that were written where nobody can notice (see on_external_write). 16-bit remainders are legal
        beside any weight: they are dropped in blocks of 1024 weights of which one was written. force: every master
        becomes exactly its weight, remainders included.

        state_dict: a model's in higher precision, from which the weights that are there now were rounded (load it into
        the model first). Masters are taken from it, by parameter name: what rounding to the weight lost is kept.
        ValueError or TypeError, naming the parameter, where it does not fit; nothing has changed then.

        Returns the number of elements that changed, of this rank.
        """
        if state_dict is not None and force:
            raise ValueError("resync_masters(): force=True takes masters from the weights, state_dict from elsewhere")
        self._refuse_open("resync_masters()")
        self._consolidated = None
        everyone = self._everyone()
        at_rest = [self.state_at_rest(p) for p in everyone]
        having = ["master_param" in state or "master_remainder" in state for state in at_rest]
        if state_dict is not None:  # masters are made where they are still to come
            having = [p.requires_grad and codec.kinds_of(self.policy, p.dtype).master is not None for p in everyone]
        with torch.no_grad():
            if state_dict is not None:
                members = self._members(everyone, having)
                changed = state_master_weights.seed(members, self._keys(having), state_dict)
                self._masters_known(members)
                return changed
            # A loop may call this in each step, whose arguments are found but once.
            plan = self._standing(everyone)
            if plan is None:
                self._refuse_converted(list(zip(param_groups.names(self.param_groups), everyone, strict=True)))
            stepped = None if plan is None else plan.those(having)
            members = self._members(everyone, having) if stepped is None else stepped
            changed = int(state_masters.resync(members, force).sum())
            if plan is None or stepped is None:
                self._masters_known(members)
            else:
                plan.look(wrote_masters=True)
        return changed

    @of_the_innermost
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
        self._consolidated = None  # its masters may become others now
        everyone = self._everyone()
        with torch.no_grad():
            trained = [p.requires_grad for p in everyone]
            members = self._members(everyone, trained)
            state_masters.resync([m for m in members if m.kinds.master])
            self._open = True
            try:
                with state_master_weights.opened(members, self._keys(trained)) as masters:
                    yield masters
            finally:
                self._open = False
                self._masters_known([m for m in members if m.kinds.master])

    def _keys(self, wanted: list[bool]) -> list[str | int]:
        return [key for key, want in zip(param_groups.keys(self.param_groups), wanted, strict=True) if want]

    def _masters_known(self, members: list[ParamState]) -> None:
        """To be what their weights are the nearest of."""
        self._seen.update({m.param: state_masters.look(m) for m in members})
        self._plan = None

    # -- saving and loading -------------------------------------------------------------------------------------------

    @untraced
    @of_the_innermost
    def state_dict(self) -> dict[str, Any]:
        """torch's format: step, exp_avg, exp_avg_sq by parameter, and master_param (fp32) where there is a master.

        Logical tensors: 8-bit and 16-bit scaled moments are decoded, masters reconstructed; what is logical at rest is
        handed out as it is, what is not is decoded where it is read: until then it goes with the training. State that
        does not exist yet is made, zero, which moves no weight and no counter. What is written to these tensors in
        place, as torch.distributed.checkpoint.load does, is the optimizer's state from then on, and that is as good as
        `load_state_dict` with them: no weight moves, and the model is loaded as well.

        Never collective. Of DTensors state is DTensors; where parameters are cut over the ranks (strategies optim and
        optim_grads) it is tensors of the parameter's shape of which this rank has its part: for
        torch.distributed.checkpoint, which saves and loads them under any strategy and number of ranks. Whatever needs
        whole tensors of them (torch.save, arithmetic) raises RuntimeError that names `consolidate_state_dict`.
        """
        if self._consolidated is not None:
            whole, self._consolidated = self._consolidated, None
            return whole
        return self._logical_state_dict("state_dict()")

    @untraced
    @of_the_innermost
    def master_state_dict(self) -> dict[str | int, Any]:
        """What is trained, in full precision: of each parameter the fp32 master, or the weight where it is its own.

        By parameter name; by position where the optimizer does not know names. Tensors as those of `state_dict()`, to
        be read, not written.
        """
        return save.masters(self, self._logical_state_dict("master_state_dict()"))

    @untraced
    @of_the_innermost
    def consolidate_state_dict(self, to: int | None = 0) -> dict[str, Any] | None:
        """`state_dict()` of whole tensors, put together from all ranks' parts, with the bits of an optimizer that is
        not sharded. Collective: every rank of the parameters' process groups calls it.

        to: the global rank that gets it, the others get None; None: every rank gets it. One parameter at a time, so a
        rank that gets nothing needs memory for one more parameter only. Where states are cut the next `state_dict()`,
        if it comes before masters change, hands out the same once more, as of torch's ZeroRedundancyOptimizer: so
        frameworks save that know of it (Lightning). torch.distributed.checkpoint saves and loads it beside the parts
        of the other ranks.
        """
        whole = save.consolidated(self, self._logical_state_dict("consolidate_state_dict()"), to)
        self._consolidated = whole if self.current_shards(self._everyone()).cut else None
        return whole

    def _logical_state_dict(self, doing: str) -> dict[str, Any]:
        """Of this rank's parts."""
        self._refuse_open(doing)
        self._make_state()
        handle = self.register_state_dict_post_hook(cast(Any, save.logical), prepend=True)  # before everybody else's
        try:
            return super().state_dict()
        finally:
            handle.remove()

    @untraced
    @of_the_innermost
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` of this class or of torch.optim.AdamW returned, under any policy.

        Masters are not rounded to the parameter's dtype; a missing master is seeded from the weight. What the policy
        keeps less of than was saved, and masters that were missing, are named in one warning. Moves no weight: a master
        that does not round to its weight at the next step becomes the weight (see on_external_write), so model and
        optimizer may be loaded in any order. Raises ValueError or TypeError, naming the parameter and the key, before
        anything has changed.
        """
        self._refuse_open("load_state_dict()")
        handle = self.register_load_state_dict_pre_hook(cast(Any, load.encode_for_load))  # after everybody else's
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def __getstate__(self) -> dict[str, Any]:
        offload_guard.refuse_states(self, "an optimizer is pickled or copied")
        kept = {key: self.__dict__[key] for key in _KEPT if key in self.__dict__}
        return super().__getstate__() | kept | {"_forms": self._forms_to_keep()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        before, entries = self.__dict__.get("state", {}), state["state"]
        loaded = all(isinstance(value, load.EncodedEntry) for value in entries.values())
        if loaded and len(before):
            self._host.forget_all()
        for key, value in entries.items():
            if isinstance(value, load.EncodedEntry):
                entries[key] = self._host.put(key, value.at_rest) if value.host else value.at_rest
        super().__setstate__(state)
        if not isinstance(entries, access.TrackedState):  # a shallow copy of an optimizer shares its state
            # What was loaded is ours alone, unless it was handed out by us before.
            handed_out = not loaded or (len(before) > 0 and access.handed_out(before))
            self.state = access.TrackedState.of(entries, handed_out, make=self._make_first_state)
        self._forget()
        self._forms = dict(state.get("_forms", {}))  # a load has none: states are for parameters as they are
        self._note_forms(self._everyone())
        for group in self.param_groups:
            param_groups.fill(group, self.defaults, self._decoupled)
            self._make_steps(group)

    # -- moving (see offloading/offload.py) ----------------------------------------------------------------------------

    def refuse_moving(self, doing: str) -> None:
        """RuntimeError where memory of parameters or states must stay (see offloading/offload.py)."""
        self._refuse_open(doing)

    def stays(self) -> Iterable[Tensor]:
        """States that live on the host, and do not move."""
        return self._host.tensors()

    def set_aside(self, grads: bool) -> None:
        """Memory went to the host (see offloading/offload.py), that of gradients among it or not: nothing holds any
        more that was made for what it contained."""
        if self._plan is not None:
            self._seen.update(self._plan.seen())
            self._plan = None
        if grads:
            self._clipping = None


class AdamW(Adam):
    """AdamW (Loshchilov & Hutter 2019) with torch.optim.AdamW's arguments and state_dict, in the dtypes of a policy.

    See Adam for the arguments.
    """

    _decoupled = True

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = LR,
        betas: tuple[float | Tensor, float | Tensor] = BETAS,
        eps: float = EPS,
        weight_decay: float = DECAY,
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
