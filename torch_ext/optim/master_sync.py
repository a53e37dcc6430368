"""resync_masters() and master_weights() of an optimizer."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from torch_ext.optim.optimizer_states import OptimizerStates
from torch_ext.optim.state import master_weights, masters
from torch_ext.optim.state.param_state import ParamState
from torch_ext.optim.state.state_dtypes import StateDtypes
from torch_ext.optim.state.write_check import SyncedVersion
from torch_ext.optim.stepper import Stepper
from torch_ext.params import param_groups


def resync(states: OptimizerStates, stepper: Stepper, force: bool) -> int:
    """Resyncs all parameters that have a master; returns how many elements changed. Keeps the plan of the last step,
    since a loop may call this in each step."""
    all_params = states.all_params()
    plan = stepper.current_plan()
    has_master = [not {"master_param", "master_remainder"}.isdisjoint(states.stored_state(p)) for p in all_params]
    stepped = None if plan is None else plan.selected_members(has_master)
    if plan is None:
        states.refuse_converted(zip(param_groups.names(states.groups), all_params, strict=True))
    members = states.members(all_params, has_master) if stepped is None else stepped
    if (watcher := states.watcher) is not None:
        watcher.before_writing()
    changed = int(masters.resync(members, force).sum())
    if watcher is not None:
        watcher.after_writing()
    if plan is None or stepped is None:
        mark_synced(states, stepper, members)
    else:
        plan.mark_synced(masters=True)
    return changed


def seed_masters(states: OptimizerStates, stepper: Stepper, state_dict: Mapping[str, Any]) -> int:
    """Copies masters from a model's state_dict in higher precision, and creates them where there are none yet; returns
    how many elements changed."""
    all_params, policy = states.all_params(), states.optimizer.policy
    has_master = [
        p.requires_grad and StateDtypes.of(policy, p.dtype, p.numel(), False).master is not None for p in all_params
    ]
    members = states.members(all_params, has_master)
    changed = master_weights.seed_masters(members, _keys(states, has_master), state_dict)
    mark_synced(states, stepper, members)
    return changed


@contextlib.contextmanager
def masters_as_params(states: OptimizerStates, stepper: Stepper) -> Iterator[dict[str | int, Tensor]]:
    """Turns parameters into their masters inside the block; see `Adam.master_weights`."""
    all_params = states.all_params()
    trained = [p.requires_grad for p in all_params]
    members = states.members(all_params, trained)
    with_master = [m for m in members if m.kinds.master]
    _resync_or_refuse(states, with_master)
    try:
        with master_weights.masters_as_params(members, _keys(states, trained)) as found:
            yield found
    finally:
        mark_synced(states, stepper, with_master)


def _resync_or_refuse(states: OptimizerStates, members: list[ParamState]) -> None:
    """Resyncs or rejects weights that were modified outside the optimizer, as a step would. Afterwards it would be too
    late: the block writes masters back to the weights."""
    how = states.optimizer.on_external_write
    if how == "error":
        masters.refuse_modified(members)
    elif how == "resync":
        states.counts[1, 1] += masters.resync(members).sum()


def _keys(states: OptimizerStates, wanted: list[bool]) -> list[str | int]:
    return [key for key, want in zip(param_groups.keys(states.groups), wanted, strict=True) if want]


def mark_synced(states: OptimizerStates, stepper: Stepper, members: list[ParamState]) -> None:
    """Records that the members' masters round to their weights now."""
    stepper.drop_plan()
    states.synced.update({m.param: SyncedVersion.of(m) for m in members if m.kinds.master == "master_param"})
