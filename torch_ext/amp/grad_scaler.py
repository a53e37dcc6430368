"""The loss scale of a policy as a torch.amp.GradScaler."""

from typing import Any

import torch
from torch import Tensor

from torch_ext.amp.loss_scale import LossScale
from torch_ext.amp.scaled_step import Visit, grads_of, refuse_underflow, unscales_in_step
from torch_ext.comm import group_calls
from torch_ext.grads.norm import mark_agreed, measure
from torch_ext.policy.policy import Policy
from torch_ext.tensors import dense


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler with a minimum, with hysteresis, and with found_inf agreed across ranks.

    Made by `policy.grad_scaler()`; disabled (every method passes through) unless the policy is fp16. Used like torch's:

        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)                   # only in order to clip or look at gradients
        torch_ext.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()

    Where torch.distributed is initialised, `unscale_` (or `step`, if `unscale_` was not called) is collective: one
    all-reduce over `process_group`, so that all its ranks skip the same steps. If a gradient is not finite,
    `optimizer.step` is not called: no counter, hook or average sees the step.

    Optimizers of torch_ext without fused=False unscale within their step. torch rejects `unscale_` of fp16 gradients,
    because they would underflow; here it leaves them scaled for such an optimizer, whose step and clip_grad_norm_ take
    the scale into account. Writing to such gradients before the step is an error.

    policy: what `load_policy` returns; its initial_loss_scale, min_loss_scale, loss_scale_growth_factor,
        loss_scale_backoff_factor, loss_scale_window (steps) and hysteresis (overflows) are this scale's.
    device: type of the device that losses and gradients are on: "cpu" or "cuda".
    process_group: the ranks that skip the same steps; None: the default group, where there is one.

    Frameworks that make their own scaler take this one: Lightning by MixedPrecision(..., scaler=scaler), Accelerate by
    `accelerator.scaler = scaler` before `prepare`.
    """

    def __init__(self, policy: Policy, device: str = "cpu", process_group: Any = None) -> None:
        if process_group is not None and torch.distributed.get_rank(process_group) < 0:
            raise ValueError(
                "this rank is not a member of process_group, so it cannot agree on skipped steps with the ranks there"
            )
        self._loss_scale = LossScale(policy)
        self._process_group = process_group
        self._visits: dict[int, Visit] = {}
        self._scaled = False
        state = self._loss_scale.state_dict()
        torch_options = {key: state[key] for key in ("growth_factor", "backoff_factor", "growth_interval")}
        super().__init__(device, init_scale=state["scale"], enabled=bool(policy.fp16), **torch_options)

    def scale(self, outputs: Any) -> Any:
        """Multiplies losses (`outputs`: a tensor or an iterable of them) by the scale."""
        self._scaled = True
        return super().scale(outputs)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the gradients by the scale, once per optimizer and update; see the class about fp16 gradients."""
        if self.is_enabled():
            self._unscale(optimizer, "unscale_()")

    def _unscale(self, optimizer: torch.optim.Optimizer, call: str) -> None:
        """call: the user's call, for messages."""
        visit = self._visits.get(id(optimizer))
        if visit is not None:
            done = "step() was" if visit.stepped else "unscale_() was already"
            raise RuntimeError(f"{done} called for this optimizer since the last update()")
        grads = grads_of(optimizer, call)
        scale = self._current_scale(grads)
        refuse_underflow(optimizer, grads)
        visit = self._visits[id(optimizer)] = Visit(optimizer, self._found_inf(grads))
        visit.unscale(grads, scale)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Calls optimizer.step(*args, **kwargs) with unscaled gradients, unless one on any rank is not finite."""
        if not self.is_enabled():
            return optimizer.step(*args, **kwargs)
        if any(closure is not None for closure in (*args, kwargs.get("closure"))):  # Accelerate passes None
            raise RuntimeError(
                "a closure cannot be used with a loss scale: its gradients would need to be unscaled inside"
            )
        visit = self._visits.get(id(optimizer))
        if visit is not None and visit.stepped:
            raise RuntimeError("step() was already called for this optimizer since the last update()")
        if unscales_in_step(optimizer):
            grads = grads_of(optimizer, "step()")
            scale = self._current_scale(grads)
            visit = visit or self._visits.setdefault(id(optimizer), Visit(optimizer, self._found_inf(grads)))
            visit.prepare(scale)
        elif visit is None:
            self._unscale(optimizer, "step()")
            visit = self._visits[id(optimizer)]
        return visit.step(*args, **kwargs)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Updates the scale after the steps of an iteration, or sets it to `new_scale`. Waits for the device."""
        if not self.is_enabled():
            return
        if new_scale is None:
            if not self._visits or not self._scaled:
                raise RuntimeError(
                    "update() comes after step() or unscale_(): no gradients were checked since the last update()"
                )
            self._loss_scale.update(any(visit.found_inf.item() != 0 for visit in self._visits.values()))
        else:
            self._loss_scale.set(scale=float(new_scale))
        super().update(self._loss_scale.value)
        for visit in self._visits.values():
            if visit.deferred:
                visit.release()
        self._visits.clear()

    def set_growth_factor(self, new_factor: float) -> None:
        self._loss_scale.set(growth_factor=new_factor)
        super().set_growth_factor(new_factor)

    def set_backoff_factor(self, new_factor: float) -> None:
        self._loss_scale.set(backoff_factor=new_factor)
        super().set_backoff_factor(new_factor)

    def set_growth_interval(self, new_interval: int) -> None:
        self._loss_scale.set(growth_interval=new_interval)
        super().set_growth_interval(new_interval)

    def state_dict(self) -> dict[str, Any]:
        """Returns torch's keys, and min_scale, hysteresis and _hysteresis_left; {} where disabled."""
        return self._loss_scale.state_dict() if self.is_enabled() else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what this class or torch.amp.GradScaler has saved; values that torch does not save stay unchanged."""
        if not self.is_enabled():
            return
        if not state_dict:
            raise RuntimeError("the state_dict is empty: it was saved by a disabled GradScaler")
        self._loss_scale.set(**state_dict)
        super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        if self._visits:
            raise RuntimeError("a GradScaler can be pickled before unscale_() and step(), or after update()")
        if self._process_group is not None:
            raise RuntimeError("a GradScaler with a process_group cannot be pickled or copied: save its state_dict()")
        return super().__getstate__()

    def _current_scale(self, grads: list[Tensor]) -> Tensor:
        if not self._scaled:
            raise RuntimeError(
                "nothing was scaled yet: scaler.scale(loss).backward() comes before unscale_() and step()"
            )
        return torch.full((), self._loss_scale.value, dtype=torch.float32, device=grads[0].device if grads else "cpu")

    def _found_inf(self, grads: list[Tensor]) -> Tensor:
        """Returns whether a gradient on any rank is not finite, as one fp32 element. Collective."""
        found_inf = measure(grads, float("inf"), dense.EMPTY).found_inf
        distributed, group = torch.distributed, self._process_group
        if group is not None or (distributed.is_available() and distributed.is_initialized()):
            what = "the loss scale: whether a gradient on any rank is not finite"
            group_calls.all_reduce(found_inf, group, what, distributed.ReduceOp.MAX)
        return mark_agreed(found_inf)
