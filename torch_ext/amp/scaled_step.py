"""Unscaling and the step of one optimizer, between two update() calls of a GradScaler."""

from typing import Any

import torch
from torch import Tensor

from torch_ext.optim.adamw import Adam
from torch_ext.params import local_shard, param_groups, reducer_registry


class Visit:
    """What a GradScaler has done with one optimizer since its last update()."""

    def __init__(self, optimizer: torch.optim.Optimizer, found_inf: Tensor) -> None:
        """found_inf: one element, whether a gradient on any rank is not finite."""
        self.found_inf, self.stepped = found_inf, False
        self.deferred: list[tuple[Tensor, int]] = []
        """fp16 gradients that stay scaled until the step, with their version counters: nothing may write to them."""
        self._optimizer: Any = optimizer
        self._unscaled = False

    def unscale(self, grads: list[Tensor], scale: Tensor) -> None:
        """Divides the gradients by the scale, or leaves that to the step if some are fp16."""
        self._unscaled = True
        if any(g.dtype == torch.float16 for g in grads):
            self._optimizer.grad_scale = scale
            self.deferred = [(g, g._version) for g in grads]
        elif grads:
            with torch.no_grad():
                torch._foreach_mul_(grads, scale.double().reciprocal().float())

    def prepare(self, scale: Tensor) -> None:
        """Sets grad_scale and found_inf on an optimizer that unscales in its step."""
        if any(g._version != version for g, version in self.deferred):
            raise RuntimeError(
                "fp16 gradients were written between unscale_() and step(), while they still are scaled: clip with "
                "torch_ext.clip_grad_norm_(optimizer, ...), which knows the scale"
            )
        if not self._unscaled:
            self._optimizer.grad_scale = scale
        self._optimizer.found_inf = self.found_inf

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the optimizer's step, unless a gradient is not finite."""
        result = None
        try:
            if self.found_inf.item() != 0:  # waits for the device, as update() would have to anyway
                self._skip()
            else:
                result = self._optimizer.step(*args, **kwargs)
        finally:
            self.release()
        self.stepped = True
        return result

    def _skip(self) -> None:
        """Counts a skipped step, and marks the optimizer as if its step had been called."""
        if isinstance(self._optimizer, Adam):
            self._optimizer._states.counts[0, 0] += 1
        for listener in reducer_registry.step_listeners(param_groups.all_params(self._optimizer.param_groups)):
            if (reducer := listener()) is not None:
                reducer.step_called()
        # LR schedulers warn where this is not set, as if they had been called before the optimizer.
        self._optimizer._opt_called = True

    def release(self) -> None:
        """Removes grad_scale and found_inf from the optimizer."""
        for name in ("grad_scale", "found_inf"):
            self._optimizer.__dict__.pop(name, None)


def grads_of(optimizer: torch.optim.Optimizer, call: str) -> list[Tensor]:
    """Returns the gradients that this rank's step reads. Raises RuntimeError if they must not be read; call: the user's
    call, with which the message begins."""
    all_params = param_groups.all_params(optimizer.param_groups)
    for owner in reducer_registry.owners_of(all_params):
        owner.before_step(call)
    if isinstance(optimizer, Adam):
        return optimizer._present_grads()
    return [local_shard.tensor_of(p.grad) for p in all_params if p.grad is not None]


def unscales_in_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's step unscales gradients itself."""
    if isinstance(optimizer, Adam):
        return optimizer.unscales_in_step
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def refuse_underflow(optimizer: torch.optim.Optimizer, grads: list[Tensor]) -> None:
    """Raises ValueError where fp16 gradients would be unscaled in place."""
    if any(g.dtype == torch.float16 for g in grads) and not unscales_in_step(optimizer):
        raise ValueError(
            "fp16 gradients would underflow when they are unscaled in place; use an optimizer of torch_ext without "
            "fused=False (it divides as it steps), or keep gradients in fp32"
        )
