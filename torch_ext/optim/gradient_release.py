"""step_in_backward=True without a process group: a gradient that is ready is applied to its parameter, and freed.

Note [gradient release]

    IDLE -- a gradient is ready --> STEPPING -- backward ends --> STEPPED -- step() or zero_grad() --> IDLE
    STEPPING -- backward raises --> BROKEN -- zero_grad() or load_state_dict() --> IDLE

Every parameter has a post-accumulate hook, which autograd calls once in a backward, after all uses of the parameter. A
call of the operator costs as much as stepping about `_FLUSH_NUMEL` elements. So gradients are kept until there are that
many elements, and then stepped by one call; the rest is stepped at the end of the backward. Hyper-parameters are read
at the first gradient of a backward.

A parameter's step does not depend on other parameters, so the bits are those of a step after backward. Whatever needs
all gradients before the first is stepped (a norm, a loss scale, another backward's gradients) is rejected.
"""

import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_ext.grads.backward_end import BackwardEnd, queue_backward_end, weak_method
from torch_ext.optim.optimizer_states import OptimizerStates
from torch_ext.optim.released_step import ReleasedStep
from torch_ext.optim.stepper import Stepper
from torch_ext.params import local_shard, param_groups, reducer_registry

_FLUSH_NUMEL = 1 << 18

_ON = "step_in_backward=True"
_HOW_TO_GO_ON = "load a checkpoint, or call zero_grad(), which keeps what was stepped and drops the other gradients"

# By id of a parameter: weak references to the parameter, and to the GradientRelease that steps it in backward.
_releases: "dict[int, tuple[weakref.ref[Tensor], weakref.ref[GradientRelease]]]" = {}


def refuse_settings(policy: Any, skip_nonfinite: bool, offload_fraction: float) -> None:
    """Raises ValueError for settings that contradict step_in_backward=True."""
    wanted = {
        "the policy's clip_grad": policy.clip_grad,
        "the policy's fp16 (a loss scale)": policy.fp16,
        "skip_nonfinite": skip_nonfinite,
        "offload_fraction": offload_fraction,
    }
    for what, value in wanted.items():
        if value:
            raise ValueError(
                f"{_ON} and {what}={value}: a parameter is stepped where its gradient is made, before the other "
                "gradients are known; leave out one of the two"
            )


class GradientRelease:
    """Steps the parameters of one optimizer in backward, when their gradients are ready."""

    def __init__(self, states: OptimizerStates, stepper: Stepper, refuse_change: Callable[[str], None]) -> None:
        """refuse_change: raises RuntimeError where masters must not change now; must not keep the optimizer alive."""
        self._states, self._stepper, self._refuse_change = states, stepper, refuse_change
        self._hooks: dict[int, Any] = {}
        self._step: ReleasedStep | None = None  # of the last backward
        self._clear()
        weakref.finalize(self, _remove, self._hooks).atexit = False

    def _clear(self) -> None:
        self._stepped: list[Tensor] = []
        self._pending: list[Tensor] = []
        self._seen: set[int] = set()  # ids of the parameters in `_stepped` and `_pending`
        self._numel = 0
        self._backward_done = False
        self._running_backwards: dict[int, weakref.ref[BackwardEnd]] = {}  # by graph task

    # -- parameters

    def follow(self, params: Iterable[Tensor], *, copied: bool = False) -> None:
        """Registers the hooks that step these parameters in backward, except frozen ones. copied: the optimizer may be
        a shallow copy of another one, and parameters that the other one steps are left to it. ValueError where a
        parameter cannot be stepped in backward."""
        for p in params:
            if id(p) in self._hooks or not p.requires_grad:
                continue
            if local_shard.is_dtensor(p):
                raise ValueError(f"{_ON} with a DTensor: its gradient is reduced after it is ready; leave it out")
            other = _releases.get(id(p))
            if other is not None and other[0]() is p and other[1]() not in (None, self):
                if copied:
                    continue
                raise ValueError(f"{_ON}: a parameter of shape {tuple(p.shape)} is stepped by another optimizer")
            _releases[id(p)] = weakref.ref(p), weakref.ref(self)
            self._hooks[id(p)] = p.register_post_accumulate_grad_hook(weak_method(self._on_grad_ready))

    def remove(self) -> None:
        """Removes the hooks, because another object steps the parameters from now on."""
        _remove(self._hooks)

    # -- in backward

    def _on_grad_ready(self, p: Tensor) -> None:
        """The post-accumulate hook of p."""
        if not self._begin():
            return
        if id(p) in self._seen:
            raise RuntimeError(
                f"{_ON}: {self._names([p])} got a second gradient in one backward, after the first was stepped: use "
                "activation checkpointing with use_reentrant=False"
            )
        self._seen.add(id(p))
        self._pending.append(p)
        self._numel += p.numel()
        if self._numel >= _FLUSH_NUMEL:
            self._flush()

    def _begin(self) -> bool:
        """Whether this object steps the gradient that is ready. Starts a step at the first gradient of a backward."""
        task = torch._C._current_graph_task_id()
        if task in self._running_backwards:
            return True
        if not any(end() is not None for end in self._running_backwards.values()):
            self._refuse_broken("a backward")
            self._refuse_second()
            if not self._start():
                return False
        self._running_backwards[task] = queue_backward_end(self._backward_ended, task)
        return True

    def _start(self) -> bool:
        """Prepares the step of a backward; False where the parameters' reducers step in backward themselves."""
        all_params = self._states.all_params()
        owners = list(reducer_registry.owners_of(all_params))
        if owners:
            _refuse_owners(owners)
            return False
        optimizer = self._states.optimizer
        refuse_settings(optimizer.policy, optimizer.skip_nonfinite, 0)
        self._refuse_change("a backward that steps")
        self._stepper.unfinished.refuse("a backward that steps")
        before = self._step
        self._clear()
        with torch.no_grad():
            self._step = self._stepper.begin_release(before)
        if self._step is not before:
            _refuse_ddp(all_params)
        return True

    def _flush(self) -> None:
        """Steps the pending parameters, except those that are left to step(), and frees their gradients."""
        pending, self._pending, self._numel = self._pending, [], 0
        assert self._step is not None
        params, before = self._step.steppable(pending), len(self._stepped)
        self._stepped += params  # before the step: after an interrupt step() must not step them a second time
        try:
            with torch.no_grad():
                self._step.run(params)
        except Exception:
            del self._stepped[before:]
            raise
        for p in params:
            p.grad = None

    def _backward_ended(self, task: int) -> None:
        """Called at the end of each backward, nested ones included; the last one steps what is pending."""
        self._running_backwards.pop(task, None)
        if not self._running_backwards and self._step is not None:
            self._flush()
            self._step.plan.mark_synced()
            self._backward_done = True
            if self._states.watcher is not None:
                self._states.watcher.after_writing()

    # -- between backwards

    @property
    def stepped(self) -> bool:
        """Whether parameters were stepped in backward, and neither step() nor zero_grad() was called since."""
        return bool(self._stepped)

    def refuse_step(self, closure: Any) -> None:
        """Raises RuntimeError where step() must not follow the last backward."""
        if closure is not None:
            raise RuntimeError(f"step(closure) with {_ON}: call backward() yourself, which steps, and then step()")
        scaled = [name for name in ("grad_scale", "found_inf") if name in vars(self._states.optimizer)]
        for name in scaled:
            vars(self._states.optimizer).pop(name)
        if scaled:
            raise RuntimeError(
                f"step() of a GradScaler with {_ON}: gradients were applied before they were unscaled. bf16 and fp32 "
                "need no loss scale: leave the scaler out, or leave out step_in_backward"
            )
        self._refuse_broken("step()")
        again = [p for p in self._stepped if p.grad is not None]
        if again:
            raise RuntimeError(
                f"step() with gradients of {self._names(again)}, which were stepped in backward ({_ON}) and have new "
                "gradients now: drop them with zero_grad()"
            )

    def refuse_clipping(self) -> None:
        """Raises RuntimeError: gradients are freed before they could be clipped."""
        raise RuntimeError(
            f"{_ON}: gradients are applied and freed before the norm of all is known; to clip them, leave out "
            "step_in_backward"
        )

    def finish(self) -> None:
        """Called when step() has stepped what was left, zero_grad() has dropped it, or a state was loaded. Registers
        hooks for parameters that have become trainable."""
        self._clear()
        self.follow(self._states.all_params(), copied=True)

    # -- what is refused

    def _refuse_broken(self, doing: str) -> None:
        """Raises RuntimeError after a backward that raised when it had stepped some parameters. If it had stepped none,
        only forgets its gradients."""
        if self._backward_done or not (self._running_backwards or self._pending or self._stepped):
            return
        if self._stepped:
            raise RuntimeError(
                f"{doing} after a backward that raised when it had stepped {self._names(self._stepped)} ({_ON}), and "
                f"not the other parameters: {_HOW_TO_GO_ON}"
            )
        self._clear()

    def _refuse_second(self) -> None:
        if self._stepped:
            raise RuntimeError(
                f"a second backward before step(): {_ON}, so the first one's gradients were applied already. To "
                "accumulate gradients leave out step_in_backward; else call step() first. Activation checkpointing "
                "with use_reentrant=True runs backwards of its own: use_reentrant=False is legal"
            )

    def _names(self, params: Sequence[Tensor]) -> str:
        known = zip(self._states.all_params(), param_groups.names(self._states.groups), strict=True)
        names = {id(p): name for p, name in known}
        shown = [names.get(id(p), "one that left") for p in params[:_SHOWN]]
        return ", ".join(shown) + (f" and {len(params) - _SHOWN} more" if len(params) > _SHOWN else "")


_SHOWN = 8


def _remove(hooks: dict[int, Any]) -> None:
    for key, handle in hooks.items():
        handle.remove()
        _releases.pop(key, None)
    hooks.clear()


def _refuse_owners(owners: Iterable[reducer_registry.GradientReducer]) -> None:
    """Raises RuntimeError where the model was parallelized with a policy without step_in_backward."""
    if not all(owner.steps_in_backward for owner in owners):
        raise RuntimeError(
            f"{_ON} of an optimizer whose model was parallelized without it: a gradient is reduced before it is "
            'stepped. Call parallelize with a policy of override_ddp_config={"step_in_backward": True} (strategies '
            "optim and optim_grads), or leave out the optimizer's argument"
        )


def _refuse_ddp(params: Sequence[Tensor]) -> None:
    """Raises RuntimeError where DistributedDataParallel reduces these gradients, which it does after they are ready.
    torch keeps no list of DistributedDataParallel modules, so all Python objects are searched if there are other
    ranks."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
        return
    ours = set(map(id, params))
    for one in gc.get_objects():
        wraps = issubclass(type(one), torch.nn.parallel.DistributedDataParallel)
        if wraps and any(id(p) in ours for p in one.parameters()):
            raise RuntimeError(
                f"{_ON} under DistributedDataParallel: gradients would be stepped before they are reduced. Use "
                'torch_ext.parallelize with override_ddp_config={"step_in_backward": True}, or leave it out'
            )
