"""An optimizer of ours as a torch.optim.Optimizer: its parts, its groups, saving, loading, pickling."""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from torch_ext.grads import clipped
from torch_ext.native.untraced import untraced
from torch_ext.optim import torch_clip_functions
from torch_ext.optim.cpu_offload.host_states import HostStates
from torch_ext.optim.grad_scaling import GradScaling
from torch_ext.optim.optimizer_states import OptimizerStates, refuse_group
from torch_ext.optim.state import access, load, save
from torch_ext.optim.step_in_backward import StepInBackward
from torch_ext.optim.stepper import Stepper
from torch_ext.params import hyper_parameters, keep_32bit, param_groups
from torch_ext.params.param_groups import Params, of_the_innermost
from torch_ext.params.shard_map import ShardMap
from torch_ext.policy.policy import Policy
from torch_ext.tensors import offload_guard

_ON_EXTERNAL_WRITE = ("resync", "error", "ignore")


@contextmanager
def _refused_twice() -> Iterator[None]:
    """ValueError for a parameter that is twice in one group, of which torch warns."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "optimizer contains a parameter group with duplicate parameters")
        try:
            yield
        except UserWarning:
            raise ValueError("a parameter is twice in one group; pass tied weights once") from None


class OptimizerBase(torch.optim.Optimizer):
    """Parameters in the dtypes of a policy, their states, and what is saved of them: everything but the step.

    It holds the parts that do the work, which find parameters, groups and states here: users and frameworks may put
    others there. What a pickle does not keep is made anew (`_assemble`).
    """

    _decoupled: bool | None = None  # None: the group says

    _states: OptimizerStates
    _scaling: GradScaling
    _stepper: Stepper
    _keep_32bit: keep_32bit.Selection | None = None  # for groups that are added; None: of an older pickle
    compared_ranks = False  # whether the ranks have compared what they keep (state/agreement.py)
    _open: bool  # within master_weights()
    _consolidated: dict[str, Any] | None  # handed out by the next state_dict(), until masters change

    def __init__(
        self,
        params: Params,
        defaults: dict[str, Any],
        policy: Policy,
        skip_nonfinite: bool,
        on_external_write: str,
        offload_fraction: float,
        kept: keep_32bit.Selection,
    ) -> None:
        if on_external_write not in _ON_EXTERNAL_WRITE:
            raise ValueError(f"on_external_write is {on_external_write!r}; {', '.join(_ON_EXTERNAL_WRITE)} are legal")
        hyper_parameters.refuse_text(skip_nonfinite, "skip_nonfinite")
        self.policy, self.skip_nonfinite, self.on_external_write = policy, skip_nonfinite, on_external_write
        self._keep_32bit = kept
        self._assemble(HostStates(offload_fraction), torch.zeros(2, 2, dtype=torch.int64), {})
        hyper_parameters.refuse(defaults, "")
        super().__init__(params, defaults)
        keep_32bit.refuse_unused(kept, self.param_groups)
        self.state = access.TrackedState.of(self.state, exposed=False, make=self._make_first_state)
        self._states.follow_params()

    def _assemble(self, host: HostStates, counts: Tensor, forms: dict[Tensor, Any]) -> None:
        """The parts, which know nothing yet but what a pickle keeps."""
        in_backward = StepInBackward()
        self._states = OptimizerStates(self, host, counts, forms)
        self._scaling = GradScaling(self._states, in_backward)
        self._stepper = Stepper(self._states, self._scaling, in_backward)
        self._open, self._consolidated = False, None
        if self.policy.clip_grad:
            torch_clip_functions.route()
            clipped.watch(self._scaling)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. Refused, with what to do about it: parameters that are twice in it or share memory, complex,
        sparse, meta and inference tensors, other dtypes than float32, bfloat16 and float16; hyper-parameters that are
        no numbers, or not legal ones; and arguments of the constructor that a group cannot have, `policy` among them.
        """
        before = len(self.param_groups)
        with _refused_twice():
            super().add_param_group(param_group)
        group = self.param_groups[before]
        try:
            refuse_group(self.param_groups, group, f"group {before}: ", self.policy)
            keep_32bit.fill(group, self._keep_32bit, f"group {before}: ")
        except Exception:
            del self.param_groups[before]
            raise
        param_groups.fill(group, {}, self._decoupled)
        self._states.make_steps(group)

    def _refuse_open(self, doing: str) -> None:
        if self._open:
            raise RuntimeError(f"{doing} within master_weights(): parameters are their masters there; leave it first")

    # -- saving and loading -------------------------------------------------------------------------------------------

    @untraced
    @of_the_innermost
    def state_dict(self) -> dict[str, Any]:
        """torch's format: step, exp_avg, exp_avg_sq by parameter, and master_param (fp32) where there is a master.

        Logical tensors: 8-bit and 16-bit scaled moments are decoded, masters reconstructed; what is stored in that form
        is handed out itself, what is not is decoded where it is read: until then it goes with the training. State that
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
        self._consolidated = whole if self.current_shards(self._states.everyone()).cut else None
        return whole

    def _logical_state_dict(self, doing: str) -> dict[str, Any]:
        self._refuse_open(doing)
        self._states.make_all()
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
        own = {key: self.__dict__[key] for key in ("policy", "skip_nonfinite", "on_external_write", "_keep_32bit")}
        states = self._states
        parts = {"_counts": states.counts, "_host": states.host, "_forms": states.forms_to_keep()}
        return super().__getstate__() | own | parts

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a pickle, a copy, or what load_state_dict and parallelize make of states (`load.EncodedEntry`)."""
        before, entries = self.__dict__.get("state", {}), state["state"]
        known = None if "_host" in state else self._states
        host = state["_host"] if known is None else known.host
        counts = state["_counts"] if known is None else known.counts
        loaded = all(isinstance(value, load.EncodedEntry) for value in entries.values())
        if loaded and len(before):
            host.clear()
        for key, value in entries.items():
            if isinstance(value, load.EncodedEntry):
                entries[key] = host.put(key, value.state) if value.host else value.state
        super().__setstate__({key: value for key, value in state.items() if key not in ("_counts", "_host", "_forms")})
        if not isinstance(entries, access.TrackedState):  # a shallow copy of an optimizer shares its state
            # What was loaded is ours alone, unless it was handed out by us before.
            exposed = not loaded or (len(before) > 0 and access.exposed(before))
            self.state = access.TrackedState.of(entries, exposed, make=self._make_first_state)
        # A load has no forms: states are for parameters as they are.
        self._assemble(host, counts, dict(state.get("_forms", {})))
        self._states.note_forms(self._states.everyone())
        for group in self.param_groups:
            param_groups.fill(group, self.defaults, self._decoupled)
            self._states.make_steps(group)

    def _make_first_state(self) -> None:  # of an optimizer that has nothing but steps
        if not self._open and not self._states.any_made():
            self._states.make_all()

    # -- what saving, loading and offloading ask (see state/stateful.py, offloading/offload.py) ------------------------

    def current_shards(self, everyone: list[Tensor]) -> ShardMap:
        """Which part of each parameter lies on this rank."""
        return self._states.current_shards(everyone)

    def stored_state(self, p: Tensor) -> Mapping[str, Any]:
        """The state of p, wherever it lies; empty where there is none."""
        return self._states.at_rest(p)

    def on_host(self, everyone: list[Tensor]) -> list[bool]:
        """Which parameters are stepped on the host."""
        return self._states.on_host(everyone)

    def refuse_moving(self, doing: str) -> None:
        """RuntimeError where memory of parameters or states must stay."""
        self._refuse_open(doing)

    def stays(self) -> Iterable[Tensor]:
        """States that live on the host, and do not move."""
        return self._states.host.tensors()

    def memory_released(self, grads: bool) -> None:
        """Memory is offloaded, that of gradients (grads) or not: what was made for its content is dropped."""
        self._stepper.drop_plan()
        if grads:
            self._scaling.clipping = None
