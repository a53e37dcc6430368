"""Gradients as the step will read them: their norm, the coefficient that clips them, the scale of the loss."""

import math
from typing import Any

import torch
from torch import Tensor

from torch_ext.grads import errors
from torch_ext.grads.norm import Clipping, is_agreed, measure
from torch_ext.native.untraced import untraced
from torch_ext.optim.optimizer_base import OptimizerStates
from torch_ext.params import hyper_parameters, reducer_registry
from torch_ext.params.param_groups import Params
from torch_ext.policy.policy import Policy
from torch_ext.tensors import dense


class GradScaling(OptimizerStates):
    """Knows what was found out about the gradients, and what the step is to do about it; writes none of them."""

    _clipping: Clipping | None

    def __init__(
        self, params: Params, defaults: dict[str, Any], policy: Policy, offload_fraction: float, skip_nonfinite: bool
    ) -> None:
        hyper_parameters.refuse_text(skip_nonfinite, "skip_nonfinite")
        self.skip_nonfinite = skip_nonfinite
        super().__init__(params, defaults, policy, offload_fraction)
        device = next((p.device for p in self._everyone() if p.requires_grad), torch.device("cpu"))
        # Steps skipped, elements whose master became the weight: by the first call of the operator in a step, by others
        # (which skip the same step once more).
        self._counts = torch.zeros(2, 2, dtype=torch.int64, device=device)

    def _forget(self) -> None:
        super()._forget()
        self._clipping = None
        self._clipped = False  # in place, by somebody, since the last step or zero_grad

    def _follow_params(self) -> None:
        super()._follow_params()
        device = next((p.device for p in self._everyone() if p.requires_grad), torch.device("cpu"))
        self._counts = self._counts.to(device)

    def _present_grads(self) -> list[Tensor]:
        """The gradients that a step would read now."""
        return [g for g in self.current_shards(self._everyone()).grads() if g is not None]

    def _refuse_scaler(self) -> None:
        """RuntimeError where somebody looked for overflow in `.grad`, which is not what is stepped."""
        assert self._locals is not None
        found_inf = self.__dict__.get("found_inf")
        if found_inf is not None and self._locals.sharded and not is_agreed(found_inf):
            for name in ("grad_scale", "found_inf"):
                self.__dict__.pop(name, None)
            raise RuntimeError(errors.FOREIGN_SCALER)

    def _scalars(self, clipping: Clipping | None) -> tuple[Tensor, Tensor, Tensor]:
        """grad_scale, clip_coef, found_inf; the first and the last are attributes that GradScaler sets for one step."""
        grad_scale = _one(self.__dict__.get("grad_scale"), self._counts.device)
        found_inf = _one(self.__dict__.get("found_inf"), self._counts.device)
        if clipping is None:
            return grad_scale, dense.NONE, found_inf
        both = clipping.found_inf if found_inf.numel() == 0 else found_inf + clipping.found_inf
        return grad_scale, clipping.clip_coef, both

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

    @untraced
    def _clip(self, max_norm: float) -> Clipping:
        """Measures the gradients; the next step multiplies by the coefficient. `torch_ext.clip_grad_norm_` calls it."""
        everyone = self._everyone()
        for owner in reducer_registry.owners_of(everyone):
            owner.before_step()
        found = self.current_shards(everyone).grads()
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
        """The clipping that these gradients were given, that of the policy where nobody gave them one, or the check
        that skip_nonfinite asks for."""
        limit = None if self._clipped else self.policy.clip_grad or None
        clipping = self._clipping
        if clipping is not None and clipping.belongs_to(grads):
            if limit is None or not clipping.only_measured:
                return clipping
            return clipping.limited(limit, _one(self.__dict__.get("grad_scale"), self._counts.device))
        self._clipping = None
        if limit is not None:
            return self._measure(grads, active, limit)
        if self.skip_nonfinite and "found_inf" not in self.__dict__:
            return self._measure(grads, active, math.inf)
        return None

    def gradients_were_clipped(self) -> None:
        """See clipped."""
        self._clipped = True


def _one(value: Any, device: torch.device) -> Tensor:
    """A scalar that somebody set as a tensor, a number or not at all, as an fp32 tensor of one element or none."""
    if value is None:
        return dense.NONE
    if not isinstance(value, Tensor):  # a copy to a GPU would wait for it, where filling does not
        return torch.full((), value, dtype=torch.float32, device=device)
    return value.to(device, torch.float32)
