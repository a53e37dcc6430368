"""Saving and loading of an optimizer of ours: state_dicts have logical tensors, as torch.optim.AdamW's have."""

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor

from torch_ext.native.untraced import untraced
from torch_ext.optim.optimizer_states import OptimizerStates
from torch_ext.optim.state import access, load, save
from torch_ext.optim.state.averaging import NO_AVERAGING, Averaging
from torch_ext.optim.step_label import LabelledOptimizer
from torch_ext.optim.stepper import Stepper
from torch_ext.optim.writing_calls import STEP, WritingCalls, writes
from torch_ext.params import hyper_parameters, local_shard
from torch_ext.params.param_groups import of_the_innermost
from torch_ext.params.shard_map import ShardMap
from torch_ext.policy.policy import Policy


class SavedOptimizer(LabelledOptimizer):
    """A torch.optim.Optimizer that stores its states in other forms than it saves them in."""

    policy: Policy
    averaging: Averaging = NO_AVERAGING
    _states: OptimizerStates
    _stepper: Stepper
    writing_calls: WritingCalls
    _open: str  # not empty inside master_weights() or ema_weights(): which of them, for messages
    _opened_by = 0  # by which thread it was entered last
    _half_loaded = False  # True while a load writes, and after one that was interrupted
    _consolidated: dict[str, Any] | None  # what the next state_dict() returns, unless masters change before

    @untraced
    @of_the_innermost
    def state_dict(self) -> dict[str, Any]:
        """Returns the state in torch's format: step, exp_avg, exp_avg_sq of each parameter, and master_param (fp32)
        where it has a master.

        The tensors are logical: 8-bit and 16-bit scaled moments are decoded, masters reconstructed. One that is stored
        in its logical form shares its memory with the optimizer's. Any other is decoded when it is read; until then it
        changes with the training. Missing state is created (moments are zero, a master is its weight), which changes no
        weight and no step count. An in-place write to these tensors, as by torch.distributed.checkpoint.load, changes
        the optimizer's state, as `load_state_dict` with them would. It changes no weight, so load the model as well.

        Never collective. The state of a DTensor is DTensors. Where parameters are sharded over the ranks (strategies
        optim and optim_grads) tensors have the parameter's shape, but this rank's part of the elements only.
        torch.distributed.checkpoint saves and loads such tensors under any strategy and number of ranks; whatever needs
        whole tensors (torch.save, arithmetic) raises a RuntimeError that names `consolidate_state_dict`.
        """
        if self._consolidated is not None:
            whole, self._consolidated = self._consolidated, None
            return whole
        return self._logical_state_dict("state_dict()")

    @untraced
    @of_the_innermost
    def consolidate_state_dict(self, to: int | None = 0) -> dict[str, Any] | None:
        """Returns `state_dict()` with whole tensors, assembled from all ranks' parts, with the bits of an optimizer
        that is not sharded. Collective: every rank of the parameters' process groups calls it.

        to: the global rank that gets it, the others get None; None: every rank gets it. Parameters are assembled one at
        a time, so a rank that gets nothing needs memory for one more parameter only. Where states are sharded, the next
        `state_dict()` returns the same once more, unless masters change before. torch's ZeroRedundancyOptimizer does
        so, and frameworks that support it (Lightning) then save whole tensors. torch.distributed.checkpoint saves and
        loads the whole tensors together with the parts of the other ranks.
        """
        whole = save.consolidated(self, self._logical_state_dict("consolidate_state_dict()"), to)
        self._consolidated = whole if self.current_shards(self._states.all_params()).flat_shards else None
        return whole

    @of_the_innermost
    def state_bytes(self) -> dict[str, int]:
        """Returns the bytes of optimizer state that this rank holds, by kind: by the keys of `state` ("exp_avg",
        "exp_avg_sq", "momentum_buffer", "scales", "master_param", "master_remainder", "ema_param", "step", ...).
        sum(optimizer.state_bytes().values()) is all of it.

        Of a parameter that is split over the ranks, DTensor or not, only this rank's part counts. A tensor counts the
        same wherever it is: on the device, in host memory (offload_fraction), or moved there by `offload`. What the
        first step will create does not count before it. Not counted: a step's workspace, and what a WeightPublisher
        keeps. Reads no tensor and allocates none; not collective.
        """
        found: dict[str, int] = {}
        for p in self._states.all_params():
            for key, value in self._states.stored_state(p).items():
                if isinstance(value, Tensor):
                    found[key] = found.get(key, 0) + local_shard.tensor_of(value).nbytes
        return found

    def _logical_state_dict(self, doing: str) -> dict[str, Any]:
        self._refuse_open(doing)
        self._states.make_all()
        handle = self.register_state_dict_post_hook(cast(Any, save.logical), prepend=True)  # before all other hooks
        try:
            with access.lending(self._states.state):
                return super().state_dict()
        finally:
            handle.remove()

    @untraced
    @of_the_innermost
    @writes("load_state_dict()")
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` of this class or of torch.optim.AdamW returned, under any policy.

        Masters are not rounded to the parameter's dtype; a missing master becomes the weight. One warning names states
        of which the policy keeps fewer bits than were saved, and masters that were missing. No weight changes: a master
        that does not round to its weight at the next step becomes the weight (see on_external_write), so model and
        optimizer may be loaded in any order. Raises ValueError or TypeError, naming the parameter and the key, before
        anything has changed; RuntimeError after a backward that stepped buckets (a policy's step_in_backward).
        """
        self._refuse_within("load_state_dict()")
        if self._stepper.stepped_in_backward():
            raise RuntimeError(
                "load_state_dict() after a backward that stepped some weights already: call step() or zero_grad() first"
            )
        if not isinstance(state_dict, Mapping):
            raise TypeError(
                f"load_state_dict() was given a {type(state_dict).__name__}: what state_dict() returned, or torch.load "
                "of its file, is legal"
            )
        handle = self.register_load_state_dict_pre_hook(cast(Any, load.encode_for_load))  # after all other hooks
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def _before_master_change(self, doing: str) -> None:
        """Called before masters are written: RuntimeError where they must not be. Drops a consolidated state_dict."""
        self._refuse_open(doing)
        self._consolidated = None

    def _refuse_open(self, doing: str) -> None:
        """Raises RuntimeError inside master_weights() or ema_weights(), during a load or add_param_group() and after a
        load that was interrupted, and for a signal handler in the middle of a step that takes several calls of the
        library."""
        self._refuse_within(doing)
        self.writing_calls.refuse_reading(doing)
        # step() itself calls this, and may find the progress of one that was interrupted.
        halfway = doing != STEP and self._stepper.unfinished.is_halfway(self._stepper.plan)
        if halfway and self.writing_calls.steps_here():
            raise RuntimeError(
                f"{doing} within step(), by a signal handler, perhaps, when it has stepped some of the parameters and "
                f"not the others: let the handler note its request, and call {doing} after the step"
            )
        if self._half_loaded:
            raise RuntimeError(
                f"{doing} after a load_state_dict() that was interrupted when it had perhaps loaded some of the state: "
                "load it again"
            )

    def _refuse_within(self, doing: str) -> None:
        if self._open:
            raise RuntimeError(f"{doing} within {self._open}; leave it first")

    # -- what saving and loading ask (see state/stateful.py) -----------------------------------------------------------

    def refuse_hyper(self, group: dict[str, Any], where: str) -> None:
        """Raises for hyper-parameters that are not legal in a group. where: for messages."""
        hyper_parameters.refuse(group, where)

    def current_shards(self, all_params: list[Tensor]) -> ShardMap:
        """Returns which part of each parameter this rank has."""
        return self._states.current_shards(all_params)

    def stored_state(self, p: Tensor) -> Mapping[str, Any]:
        """Returns the stored state of p, from opt.state or from the host; empty where there is none."""
        return self._states.stored_state(p)

    def on_host(self, all_params: list[Tensor]) -> list[bool]:
        """Returns for each parameter whether it is stepped on the host."""
        return self._states.on_host(all_params)
