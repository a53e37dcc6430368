"""Guards optimizer steps of a DistributedDataParallel with our hook. No optimizer may step gradients of a backward that
raised. A step of this library's optimizers that was interrupted half-way is recorded."""

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torch_ext.parallel.cycle import Cycle
from torch_ext.parallel.sent_bytes import SentBytes
from torch_ext.params import param_groups, reducer_registry


class Guard(reducer_registry.StepListener):
    """Records for one hook whether its gradients must not be stepped, and whether the last step ended."""

    def __init__(self) -> None:
        self.cycle: Cycle | None = None
        """The hook's cycle, once the ranks are connected."""
        self.failure: str | None = None
        """Why the ranks could not be connected."""
        self.sent: SentBytes | None = None
        """The hook's count of bytes, once the ranks are connected."""
        self._alarmed = self._stepping = False
        self._params: set[torch.Tensor] = set()
        # After a backward that raised: parameter, gradient, and the gradient's version counter then.
        self._unreduced: list[tuple[torch.Tensor, weakref.ref[torch.Tensor], int]] = []

    def watch(self, params: Sequence[torch.Tensor]) -> None:
        """Guards the hook's parameters, and clears the alarms of guards that earlier hooks had for them."""
        global _step_hook
        self._params = set(params)
        if _step_hook is None:
            _step_hook = register_optimizer_step_pre_hook(_before_step)
        reducer_registry.register_listener(self, params)
        _guards.add(self)
        for guard in _guards_of(params):
            guard._alarmed = False

    def alarm(self) -> None:
        """Called when a backward ended in an error: either nothing can be reduced any more, or a gradient was not
        finite on some rank, so that none was reduced."""
        with_grads = [(p, p.grad) for p in self._params if p.grad is not None]
        self._unreduced = [(p, weakref.ref(grad), grad._version) for p, grad in with_grads]
        self._alarmed = True

    def step_begins(self) -> None:
        if self.cycle is not None:
            self.cycle.stepping()
            self._stepping = self._alarmed = True  # an earlier alarm is void: `refuse_step` let this step begin

    def step_written(self) -> None:
        if self.cycle is not None:
            self.cycle.stepped()
            self._stepping = self._alarmed = False

    def step_called(self) -> None:
        if self.sent is not None:
            self.sent.end()

    def before_step(self) -> None:
        """Called before any optimizer steps the parameters. Raises RuntimeError if an exchange failed, if the last step
        did not end, or if the gradients still are those that backward found not finite."""
        if not self._alarmed:
            return
        if self.cycle is None:
            raise RuntimeError(f"step() after an exchange that failed: {self.failure}")
        left = any(
            p.grad is not None and p.grad is grad() and p.grad._version == version
            for p, grad, version in self._unreduced
        )
        if not left:
            self.cycle.zero(self.cycle.nonfinite())
        # Otherwise the user has dropped or changed all these gradients, and may step what is there now.
        if self._stepping or self.cycle.failure is not None or self.cycle.nonfinite():
            self.cycle.check_step("step()")


_guards: "weakref.WeakSet[Guard]" = weakref.WeakSet()
_step_hook: Any = None


def _guards_of(params: Iterable[torch.Tensor]) -> list[Guard]:
    return [guard for guard in _guards if not guard._params.isdisjoint(params)]


def _before_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    if _guards:
        for guard in _guards_of(param_groups.all_params(optimizer.param_groups)):
            guard.before_step()
            guard.step_called()
