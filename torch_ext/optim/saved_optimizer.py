"""What an optimizer of ours saves and loads: logical tensors, as torch.optim.AdamW's."""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from torch_ext.native.untraced import untraced
from torch_ext.optim.optimizer_states import OptimizerStates
from torch_ext.optim.state import load, save
from torch_ext.optim.state.averaging import NONE, Averaging
from torch_ext.optim.stepper import Stepper
from torch_ext.params import hyper_parameters
from torch_ext.params.param_groups import of_the_innermost
from torch_ext.params.shard_map import ShardMap
from torch_ext.policy.policy import Policy


class SavedOptimizer(torch.optim.Optimizer):
    """A torch.optim.Optimizer whose states are stored in other forms than they are saved in."""

    policy: Policy
    averaging: Averaging = NONE
    _states: OptimizerStates
    _stepper: Stepper
    _open: str  # within master_weights() or ema_weights(), and what parameters are there
    _half_loaded = False  # while a load writes
    _consolidated: dict[str, Any] | None  # handed out by the next state_dict(), until masters change

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
        handle = self.register_load_state_dict_pre_hook(cast(Any, load.encode_for_load))  # after everybody else's
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def _refuse_open(self, doing: str) -> None:
        self._refuse_within(doing)
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
        """Raises for hyper-parameters that no group may have. where: for messages."""
        hyper_parameters.refuse(group, where)

    def current_shards(self, everyone: list[Tensor]) -> ShardMap:
        """Which part of each parameter lies on this rank."""
        return self._states.current_shards(everyone)

    def stored_state(self, p: Tensor) -> Mapping[str, Any]:
        """The state of p, wherever it lies; empty where there is none."""
        return self._states.at_rest(p)

    def on_host(self, everyone: list[Tensor]) -> list[bool]:
        """Which parameters are stepped on the host."""
        return self._states.on_host(everyone)
