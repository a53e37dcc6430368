"""An optimizer of ours as a torch.optim.Optimizer: its parts, its groups, pickling."""

import types
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

from torch_ext.grads import clipped
from torch_ext.grads.backward_end import weak_method
from torch_ext.optim import torch_clip_functions
from torch_ext.optim.cpu_offload.host_states import HostStates
from torch_ext.optim.grad_scaling import GradScaling
from torch_ext.optim.gradient_release import GradientRelease, refuse_settings
from torch_ext.optim.optimizer_states import OptimizerStates, inherit_requests, refuse_group
from torch_ext.optim.saved_optimizer import SavedOptimizer
from torch_ext.optim.state import access, flattened, load
from torch_ext.optim.step_in_backward import StepInBackward
from torch_ext.optim.stepper import Stepper
from torch_ext.optim.writing_calls import STEP, WritingCalls, writes
from torch_ext.params import hyper_parameters, keep_32bit, param_groups
from torch_ext.params.param_groups import Params
from torch_ext.policy.policy import Policy
from torch_ext.tensors import offload_guard

_PICKLED = ("policy", "skip_nonfinite", "on_external_write", "step_in_backward", "_keep_32bit", "averaging")

_ON_EXTERNAL_WRITE = ("resync", "error", "ignore")


@contextmanager
def _reject_duplicates() -> Iterator[None]:
    """Raises ValueError where torch only warns: for a parameter that is twice in one group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "optimizer contains a parameter group with duplicate parameters")
        try:
            yield
        except UserWarning:
            raise ValueError("a parameter is twice in one group; pass tied weights once") from None


def _step_without_grad(stepper: Stepper, released: bool) -> None:
    """Steps as under torch.no_grad, which takes five times as long."""
    records = torch.is_grad_enabled()
    try:
        torch._C._set_grad_enabled(False)  # within: an interrupt after it must not leave recording off
        stepper.step(released)
    finally:
        torch._C._set_grad_enabled(records)


class OptimizerBase(SavedOptimizer):
    """A torch.optim.Optimizer of parameters in the dtypes of a policy: groups, states and pickling, without the step.

    The parts that do the work (OptimizerStates, Stepper, ...) read parameters, groups and states from this object each
    time, since users and frameworks may replace them here. `_assemble` recreates the parts that a pickle does not keep.
    """

    _decoupled: bool | None = None  # whether groups decouple weight decay by default; None: as the loaded state says

    _scaling: GradScaling
    _keep_32bit: keep_32bit.Selection | None = None  # applied to groups that are added; None: from an older pickle
    step_in_backward = False  # the value where an older pickle has none
    _release: GradientRelease | None = None
    _given: Mapping[str, Any] = types.MappingProxyType({})  # arguments of the constructor; empty in a copy
    compared_ranks = False  # whether the ranks have compared the dtypes of their states (state/agreement.py)

    def __init__(
        self,
        params: Params,
        defaults: dict[str, Any],
        policy: Policy,
        skip_nonfinite: bool,
        on_external_write: str,
        offload_fraction: float,
        kept: keep_32bit.Selection,
        step_in_backward: bool = False,
    ) -> None:
        if on_external_write not in _ON_EXTERNAL_WRITE:
            raise ValueError(f"on_external_write is {on_external_write!r}; {', '.join(_ON_EXTERNAL_WRITE)} are legal")
        hyper_parameters.refuse_text(skip_nonfinite, "skip_nonfinite")
        hyper_parameters.refuse_text(step_in_backward, "step_in_backward")
        if step_in_backward:
            refuse_settings(policy, skip_nonfinite, offload_fraction)
        self.step_in_backward = bool(step_in_backward)
        self.policy, self.skip_nonfinite, self.on_external_write = policy, skip_nonfinite, on_external_write
        self._keep_32bit = kept
        self._assemble(HostStates(offload_fraction), torch.zeros(2, 2, dtype=torch.int64, device="cpu"), {})
        self.refuse_hyper(defaults, "")
        super().__init__(params, defaults)
        keep_32bit.refuse_unused(kept, self.param_groups)
        self.state = access.TrackedState.of(self.state, exposed=False, make=self._make_first_state)
        self._states.follow_params()

    def _assemble(
        self, host: HostStates, counts: Tensor, forms: dict[Tensor, Any], known: OptimizerStates | None = None
    ) -> None:
        """Creates the parts from what a pickle keeps. known: the OptimizerStates that a load replaces."""
        self.__dict__.setdefault("writing_calls", WritingCalls())  # a load keeps it: it is noted there
        in_backward = StepInBackward()
        states = OptimizerStates(self, host, counts, forms)
        if known is not None:  # before self._states is set: a load that is interrupted here can be repeated
            inherit_requests(known, states)
        self._states = states
        self._scaling = GradScaling(self._states, in_backward)
        self._stepper = Stepper(self._states, self._scaling, in_backward)
        self._open, self._consolidated = "", None
        if self._release is not None:
            self._release.remove()
        if self.step_in_backward:
            self._release = GradientRelease(self._states, self._stepper, weak_method(self._before_master_change))
            torch_clip_functions.route()
            clipped.register(self._scaling)
            self._scaling.refuse_clipping = weak_method(self._release.refuse_clipping)
        if self.policy.clip_grad:
            torch_clip_functions.route()
            clipped.register(self._scaling)

    @writes("add_param_group()")
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as torch's does. Raises, and says what to do, for parameters that are twice in it or share
        memory; for complex, sparse, meta and inference tensors; for dtypes other than float32, bfloat16 and float16;
        for hyper-parameters that are no numbers, or not legal ones; and for arguments of the constructor that a group
        cannot have, `policy` among them.
        """
        if self._open and self._opened_by != get_ident():  # it goes through the groups
            self._refuse_within("add_param_group()")
        before = len(self.param_groups)
        try:
            with _reject_duplicates():
                super().add_param_group(param_group)
            offload_guard.refuse_params(self._states.all_params(), "add_param_group()")
            group = self.param_groups[before]
            own = self.policy, self.averaging, self.refuse_hyper, self._given
            refuse_group(self.param_groups, group, f"group {before}: ", *own)
            keep_32bit.fill(group, self._keep_32bit, f"group {before}: ")
            param_groups.fill(group, {}, None)
            self._states.make_steps(group)
        except BaseException:
            self._drop_groups(before)
            raise
        if self._release is not None:
            self._release.follow(group["params"])

    def _drop_groups(self, first: int) -> None:
        """Removes the groups from `first` on, whose addition raised or was interrupted."""
        del self.param_groups[first:]
        self._states.drop_removed(self._states.all_params())

    # -- pickling -----------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        doing = "an optimizer is pickled or copied"
        self._refuse_open(doing)
        offload_guard.refuse_states(self, doing)
        own = {key: self.__dict__[key] for key in _PICKLED if key in self.__dict__}
        states = self._states
        states.host.follow_moved(states.all_params(), self.state)
        parts = {"_counts": states.counts, "_host": states.host, "_forms": states.forms_to_keep()}
        return super().__getstate__() | own | parts

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores a pickle or a copy, or installs states that load_state_dict or parallelize has encoded
        (`load.EncodedEntry`)."""
        before, entries = self.__dict__.get("state", {}), state["state"]
        known = None if "_host" in state else self._states
        self._half_loaded = known is not None
        host = state["_host"] if known is None else known.host
        counts = state["_counts"] if known is None else known.counts
        groups = state["param_groups"] if known is None else self.param_groups  # not the loaded ones: may be Adam's
        decoupled = [self._decoupled and group.get("decoupled_weight_decay", True) for group in groups]
        loaded = all(isinstance(value, load.EncodedEntry) for value in entries.values())
        if loaded and len(before):
            host.clear()
        for key, value in entries.items():
            if isinstance(value, load.EncodedEntry):
                entries[key] = host.put(key, value.state) if value.host else value.state
        super().__setstate__({key: value for key, value in state.items() if key not in ("_counts", "_host", "_forms")})
        if not isinstance(entries, access.TrackedState):  # a shallow copy of an optimizer shares its state
            # No code outside the optimizer has loaded states, unless it had them before the load.
            exposed = not loaded or (len(before) > 0 and access.exposed(before))
            lent = len(before) > 0 and access.lent(before)
            self.state = access.TrackedState.of(entries, exposed, lent, self._make_first_state)
        forms = dict(state.get("_forms", {}))  # none in a load, whose states are for the parameters as they are now
        self._assemble(host, counts, forms, known)
        self._states.note_forms(self._states.all_params())
        for group, own in zip(self.param_groups, decoupled, strict=True):
            self._fill(group, own)
            self._states.make_steps(group)
        if self._release is not None:
            self._release.follow(self._states.all_params(), copied=True)
        self._half_loaded = False

    def _fill(self, group: dict[str, Any], decoupled: bool | None) -> None:
        """Adds the keys that a group saved by another optimizer or version lacks."""
        param_groups.fill(group, self.defaults, decoupled)

    def _make_first_state(self) -> None:  # where there are step counts only
        flattened.patch()  # torch.distributed.checkpoint asks for state before it loads a state_dict
        if not self._open and not self._states.has_any_state():
            self._states.make_all()

    def _take_step(self, release: GradientRelease | None) -> None:
        self._before_master_change(STEP)
        _step_without_grad(self._stepper, release is not None and release.stepped)
        if release is not None:
            release.finish()

    # -- what the step asks --------------------------------------------------------------------------------------------

    @property
    def adamw_groups(self) -> list[dict[str, Any]]:
        """The parameter groups with AdamW's hyper-parameters."""
        return self.param_groups

    def stepped_in_backward(self) -> bool:
        """Whether some parameters were stepped in backward, and step() was not called since."""
        return self._stepper.stepped_in_backward() or (self._release is not None and self._release.stepped)

    def refuse_between(self, doing: str) -> None:
        """Raises RuntimeError between a backward that stepped parameters and the step() that follows it."""
        if self.stepped_in_backward():
            raise RuntimeError(f"{doing} after a backward that stepped some weights already: call step() first")

    def refuse_unfinished(self, doing: str) -> None:
        """Raises RuntimeError after a step that was interrupted when it may have stepped some parameters."""
        self._stepper.unfinished.refuse(doing)

    # -- what offloading asks (see offloading/offload.py) --------------------------------------------------------------

    def refuse_moving(self, doing: str) -> None:
        """Raises RuntimeError where the memory of parameters or states must not move now."""
        self.writing_calls.refuse(doing)
        self._refuse_open(doing)
        if self._states.watcher is not None:
            self._states.watcher.weights_move()

    def host_tensors(self) -> Iterable[Tensor]:
        """Returns the state tensors that are always on the host, and so are not offloaded."""
        return self._states.host.tensors()

    def weights_moved(self, params: Iterable[Tensor], offloaded: bool) -> None:
        """Called when the memory of parameters was offloaded, or else is allocated again with its content."""
        if self._states.watcher is not None:
            self._states.watcher.weights_moved(params, offloaded)

    def memory_released(self, grads: bool) -> None:
        """Called when memory was offloaded: drops what was computed for its content. grads: gradients were, too."""
        self._stepper.drop_plan()
        if grads:
            self._scaling.clipping = None
