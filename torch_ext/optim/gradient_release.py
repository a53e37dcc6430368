"""step_in_backward=True without a process group: a parameter is stepped, and its gradient freed, once it is ready.

Note [gradient release]

    IDLE -- a gradient is ready --> STEPPING -- backward ends --> STEPPED -- step() or zero_grad() --> IDLE
    STEPPING -- backward raises --> BROKEN -- zero_grad() or load_state_dict() --> IDLE

Every parameter's post-accumulate hook leads here: it is called once in a backward, after all uses of the parameter.
Gradients are kept until `_TOGETHER` elements are there, and then stepped by one call of the operator, which costs as
much as stepping that many; all others at the end of the backward. Hyper-parameters are those of the first gradient.

A parameter's step does not depend on the others, so the bits are those of a step after backward. What would have to be
known of all gradients before the first is stepped (a norm, a loss scale, another backward's gradients) is refused.
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

_TOGETHER = 1 << 18

_ON = "step_in_backward=True"
_HOW_TO_GO_ON = "load a checkpoint, or call zero_grad(), which keeps what was stepped and drops the other gradients"

# Of parameters: by whom they are stepped in backward.
_releases: "dict[int, tuple[weakref.ref[Tensor], weakref.ref[GradientRelease]]]" = {}


def refuse_settings(policy: Any, skip_nonfinite: bool, offload_fraction: float) -> None:
    """ValueError for what contradicts step_in_backward=True."""
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
    """Of one optimizer."""

    def __init__(self, states: OptimizerStates, stepper: Stepper, may_change: Callable[[str], None]) -> None:
        """may_change: RuntimeError where masters must not change now; must not hold the optimizer."""
        self._states, self._stepper, self._may_change = states, stepper, may_change
        self._hooks: dict[int, Any] = {}
        self._step: ReleasedStep | None = None  # of the last backward
        self._clear()
        weakref.finalize(self, _remove, self._hooks).atexit = False

    def _clear(self) -> None:
        self._stepped: list[Tensor] = []
        self._pending: list[Tensor] = []
        self._seen: set[int] = set()  # of both
        self._numel = 0
        self._ended = False
        self._ends: dict[int, weakref.ref[BackwardEnd]] = {}  # by graph task: of backwards that are running

    # -- parameters

    def follow(self, params: Iterable[Tensor], *, copied: bool = False) -> None:
        """These are stepped in backward from here on, as far as they are trained. copied: of an optimizer that may be a
        shallow copy of another, which steps them. ValueError where one cannot be."""
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
            self._hooks[id(p)] = p.register_post_accumulate_grad_hook(weak_method(self._ready))

    def remove(self) -> None:
        """Another object steps them."""
        _remove(self._hooks)

    # -- in backward

    def _ready(self, p: Tensor) -> None:
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
        if self._numel >= _TOGETHER:
            self._flush()

    def _begin(self) -> bool:
        """Whether the gradient that is ready is stepped here."""
        task = torch._C._current_graph_task_id()
        if task in self._ends:
            return True
        if not any(end() is not None for end in self._ends.values()):
            self._refuse_broken("a backward")
            self._refuse_second()
            if not self._start():
                return False
        self._ends[task] = queue_backward_end(self._backward_ended, task)
        return True

    def _start(self) -> bool:
        everyone = self._states.everyone()
        owners = list(reducer_registry.owners_of(everyone))
        if owners:
            _refuse_owners(owners)
            return False
        optimizer = self._states.optimizer
        refuse_settings(optimizer.policy, optimizer.skip_nonfinite, 0)
        self._may_change("a backward that steps")
        self._stepper.unfinished.refuse("a backward that steps")
        before = self._step
        self._clear()
        with torch.no_grad():
            self._step = self._stepper.begin_release(before)
        if self._step is not before:
            _refuse_ddp(everyone)
        return True

    def _flush(self) -> None:
        pending, self._pending, self._numel = self._pending, [], 0
        assert self._step is not None
        params, before = self._step.steppable(pending), len(self._stepped)
        self._stepped += params  # an interrupt finds them perhaps stepped, and step() must not do it once more
        try:
            with torch.no_grad():
                self._step.run(params)
        except Exception:
            del self._stepped[before:]
            raise
        for p in params:
            p.grad = None

    def _backward_ended(self, task: int) -> None:
        self._ends.pop(task, None)
        if not self._ends and self._step is not None:
            self._flush()
            self._step.plan.mark_synced()
            self._ended = True
            if self._states.watcher is not None:
                self._states.watcher.after_writing()

    # -- between backwards

    @property
    def stepped(self) -> bool:
        """Whether something was stepped, and neither step() nor zero_grad() was called since."""
        return bool(self._stepped)

    def refuse_step(self, closure: Any) -> None:
        """RuntimeError where step() cannot follow."""
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
        """RuntimeError: there is nothing to clip."""
        raise RuntimeError(
            f"{_ON}: gradients are applied and freed before the norm of all is known; to clip them, leave out "
            "step_in_backward"
        )

    def finish(self) -> None:
        """step() has stepped what was left, or zero_grad() dropped it, or another state was loaded."""
        self._clear()
        self.follow(self._states.everyone(), copied=True)

    # -- what is refused

    def _refuse_broken(self, doing: str) -> None:
        """A backward raised; where nothing was stepped before, that is nobody's matter."""
        if self._ended or not (self._ends or self._pending or self._stepped):
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
        known = zip(self._states.everyone(), param_groups.names(self._states.groups), strict=True)
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
    """RuntimeError where the policy of a model that was parallelized says something else."""
    if not all(owner.steps_in_backward for owner in owners):
        raise RuntimeError(
            f"{_ON} of an optimizer whose model was parallelized without it: a gradient is reduced before it is "
            'stepped. Call parallelize with a policy of override_ddp_config={"step_in_backward": True} (strategies '
            "optim and optim_grads), or leave out the optimizer's argument"
        )


def _refuse_ddp(params: Sequence[Tensor]) -> None:
    """RuntimeError where DistributedDataParallel reduces these gradients, which it does after they are ready. Torch
    knows its modules nowhere, so they are looked for among all objects, where there are other ranks."""
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
