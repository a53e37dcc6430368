"""What the step applies to gradients as it reads them: the clip coefficient and the loss scale."""

import math
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any, TypeAlias

import torch
from torch import Tensor

from torch_ext.grads import errors
from torch_ext.grads.norm import Clipping, is_agreed, measure
from torch_ext.native.untraced import untraced
from torch_ext.optim.optimizer_states import OptimizerStates
from torch_ext.optim.state.param_state import ParamState
from torch_ext.optim.step_in_backward import StepInBackward
from torch_ext.params import param_groups, reducer_registry
from torch_ext.params.shard_map import ShardMap
from torch_ext.tensors import dense

Scalars: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""grad_scale, clip_coef and found_inf of a step."""


class GradScaling:
    """Keeps the clip coefficient and the loss scale that the next step applies to an optimizer's gradients; writes no
    gradient itself. Implements `clipped.Clipper`."""

    def __init__(self, states: OptimizerStates, in_backward: StepInBackward) -> None:
        self._states, self._in_backward = states, in_backward
        self.refuse_clipping: Callable[[], None] | None = None
        """Raises RuntimeError; set where gradients are stepped before they can be clipped."""
        self.clipping: Clipping | None = None
        self.clipped_in_place = False
        """Whether gradients were clipped in place since the last step or zero_grad (by torch's functions, say)."""

    def forget(self) -> None:
        """Drops a clip coefficient that no step has applied."""
        self.clipping = None
        self.clipped_in_place = False

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._states.groups

    def gradients_were_clipped(self) -> None:
        if self.refuse_clipping is not None:
            self.refuse_clipping()
        self.clipped_in_place = True

    # -- what torch.amp.GradScaler sets on the optimizer for one step

    def refuse_local_scaler(self, shards: ShardMap) -> None:
        """Raises RuntimeError where a scaler has looked for overflow in `.grad`, but the gradients that are stepped are
        shards elsewhere."""
        found_inf = vars(self._states.optimizer).get("found_inf")
        if found_inf is not None and shards.sharded and not is_agreed(found_inf):
            for name in ("grad_scale", "found_inf"):
                vars(self._states.optimizer).pop(name, None)
            raise RuntimeError(errors.FOREIGN_SCALER)

    def scalars(self, clipping: Clipping | None) -> Scalars:
        """Returns grad_scale, clip_coef and found_inf; each is an fp32 tensor of one element, or empty."""
        grad_scale, found_inf = self._scalar("grad_scale"), self._scalar("found_inf")
        if clipping is None:
            return grad_scale, dense.EMPTY, found_inf
        both = clipping.found_inf if found_inf.numel() == 0 else found_inf + clipping.found_inf
        return grad_scale, clipping.clip_coef, both

    def applies_at_most_clipping(self) -> bool:
        """Whether `clipping` is all that a step now would apply to gradients, if it applies anything: it would neither
        unscale nor measure them."""
        optimizer = self._states.optimizer
        attributes = vars(optimizer)
        return (
            "grad_scale" not in attributes
            and "found_inf" not in attributes
            and not optimizer.skip_nonfinite
            and (self.clipped_in_place or not optimizer.policy.clip_grad)
        )

    def end_step(self, clipping: Clipping | None, members: Sequence[ParamState], grads: Sequence[Tensor]) -> None:
        """Called after a step of these members with these gradients. clipping: what it has applied."""
        self.clipped_in_place = False
        if clipping is not None:
            clipping.used = True
            clipping.warn_if_skipped(members, grads)

    def unscales(self) -> bool:
        """Whether a scaler has left unscaling, or skipping, to the step."""
        return not {"grad_scale", "found_inf"}.isdisjoint(vars(self._states.optimizer))

    def _scalar(self, name: str) -> Tensor:
        value, device = vars(self._states.optimizer).get(name), self._states.counts.device
        if value is None:
            return dense.EMPTY
        if not isinstance(value, Tensor):  # filled on the device: a copy to a GPU would wait for it
            return torch.full((), value, dtype=torch.float32, device=device)
        return value.to(device, torch.float32)

    # -- clipping

    @untraced
    def clip(self, max_norm: float) -> Clipping:
        """Measures the gradients; the next step multiplies by the coefficient. `torch_ext.clip_grad_norm_` calls it."""
        self._in_backward.refuse_clipping()
        if self.refuse_clipping is not None:
            self.refuse_clipping()
        all_params = self._states.all_params()
        for owner in reducer_registry.owners_of(all_params):
            owner.before_step("clip_grad_norm_()")
        shards = self._states.current_shards(all_params)
        found = shards.grads()
        grads = [g for g in found if g is not None]
        self.clipping = self._measure(shards, grads, [g is not None for g in found], max_norm)
        self.clipping.attach(grads)
        return self.clipping

    def _measure(self, shards: ShardMap, grads: list[Tensor], active: list[bool], max_norm: float) -> Clipping:
        shards.refuse_mixed()
        parts = None if shards.plain else shards.parts(active)

        def name_of(i: int) -> str:
            return f"the gradient of {list(compress(param_groups.names(self._states.groups), active))[i]}"

        return measure(grads, max_norm, self._scalar("grad_scale"), parts, name_of)

    def current_clipping(self, shards: ShardMap, grads: list[Tensor], active: list[bool]) -> Clipping | None:
        """Returns the clipping of these gradients: by clip_grad_norm_ if it was called for them, else by the policy's
        clip_grad, else the check for finiteness that skip_nonfinite asks for; None where there is none of these."""
        optimizer, clipping = self._states.optimizer, self.clipping
        limit = None if self.clipped_in_place else optimizer.policy.clip_grad or None
        if clipping is not None and clipping.belongs_to(grads):
            clipping.refuse_scale(self._scalar("grad_scale"))
            if limit is None or not clipping.only_measured:
                return clipping
            return clipping.limited(limit, self._scalar("grad_scale"))
        self.clipping = None
        if limit is not None:
            return self._measure(shards, grads, active, limit)
        if optimizer.skip_nonfinite and "found_inf" not in vars(optimizer):
            return self._measure(shards, grads, active, math.inf)
        return None
