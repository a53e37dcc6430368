"""Asking one step to measure itself, and reading what it found."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_ext.comm import group_calls
from torch_ext.native import constants
from torch_ext.optim.ema import AveragingOptimizer
from torch_ext.optim.health_report import Health, ParamHealth
from torch_ext.optim.optimizer_states import OptimizerStates
from torch_ext.optim.state.measurement import Measurement
from torch_ext.optim.state.state_dtypes import StateDtypes
from torch_ext.optim.writing_calls import writes
from torch_ext.params import param_groups
from torch_ext.params.param_groups import of_the_innermost

_CALL = "health()"


class MeasuringOptimizer(AveragingOptimizer):
    """An optimizer that measures a step where it is asked to; other steps cost nothing more."""

    @of_the_innermost
    @writes("measure_health()")
    def measure_health(self) -> None:
        """Makes the next step measure itself, for `health()`. Call it on every rank. A step that is captured into a
        CUDA graph cannot measure itself."""
        self.refuse_between("measure_health()")
        self._states.measuring.next = Measurement()
        self._stepper.drop_plan()

    @of_the_innermost
    def health(self) -> Health:
        """Returns what the step after `measure_health()` measured for each parameter: rms(update) / rms(weight), the
        share of weights that moved, the share of updates below half an ulp of their weight, and the largest weight.

        The figures are of whole parameters: where they are sharded over ranks this is collective, as clip_grad_norm_
        is, and every rank gets the same. RuntimeError where no step was asked to measure, or none came since.
        """
        measured = self._states.measuring.last
        if measured is None:
            asked = self._states.measuring.next is not None
            raise RuntimeError(
                f"{_CALL}: "
                f"{'no step was taken since measure_health()' if asked else 'measure_health() was not called'}; call "
                "measure_health(), take a step, and then health()"
            )
        return Health(_read(self._states, measured), measured.step)


def _read(states: OptimizerStates, measured: Measurement) -> list[ParamHealth]:
    """Returns the measurements of the parameters that the measured step stepped. Collective where they are sharded."""
    all_params = states.all_params()
    shards = states.current_shards(all_params)
    keys, kept = param_groups.keys(states.groups), param_groups.kept_32bit(states.groups)
    table = _on_host([measured.rows.get(p) for p in all_params])
    by_groups: dict[tuple[torch.distributed.ProcessGroup, ...], list[int]] = {}
    for i in range(len(all_params)):
        if groups := tuple(shards.of(i).groups):
            by_groups.setdefault(groups, []).append(i)
    for groups, members in by_groups.items():
        table[members] = _summed(table[members], groups, all_params[members[0]].device)
    policy = states.optimizer.policy
    roundings = [group["weight_rounding"] for group in states.groups for _ in group["params"]]
    found = []
    for i, (p, row) in enumerate(zip(all_params, table, strict=True)):
        if not row.any():  # the measured step did not step it
            continue
        kinds = StateDtypes.of(policy, p.dtype, p.numel(), kept[i])
        keeps = kinds.master is not None or p.dtype == torch.float32 or roundings[i] != "nearest"
        found.append(ParamHealth.of(str(keys[i]), row, keeps, p.dtype == torch.float16))
    return found


def _on_host(rows: Sequence[Tensor | None]) -> Tensor:
    """Returns the rows as one table on the host, with zeros where a row is None."""
    table = torch.zeros((len(rows), constants.HEALTH_LEN), dtype=torch.int64, device="cpu")
    for device in dict.fromkeys(row.device for row in rows if row is not None):
        there = [(at, row) for at, row in enumerate(rows) if row is not None and row.device == device]
        table[[at for at, _ in there]] = torch.stack([row for _, row in there]).cpu()
    return table


def _summed(rows: Tensor, groups: Sequence[torch.distributed.ProcessGroup], device: torch.device) -> Tensor:
    """Returns the rows reduced over all ranks. Columns are integers: the last is the bit pattern of the largest weight,
    of which the maximum is taken; all others are summed."""
    sums, largest = rows[:, :-1].contiguous().to(device), rows[:, -1].contiguous().to(device)
    for group in groups:
        group_calls.all_reduce(sums, group, _CALL)
        group_calls.all_reduce(largest, group, _CALL, torch.distributed.ReduceOp.MAX)
    return torch.cat([sums, largest[:, None]], 1).cpu()
