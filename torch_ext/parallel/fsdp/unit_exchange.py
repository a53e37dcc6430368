"""The exchange of a model that FSDP2 shards: runs the actions of its gradient cycle (Note [the cycle] in
csrc/torch_ext_cycle.h). FSDP2 hands over units' gradients; communicators reduce them; the sums are added to shards.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from torch_ext.comm.communicator import Communicator, Part
from torch_ext.comm.streams import Stream
from torch_ext.comm.wire import WireBuffer, reduce_chunks
from torch_ext.grads.errors import names_of
from torch_ext.grads.stats import ALL_FINITE, first_nonfinite
from torch_ext.parallel.cycle import DISCARD, IF_SENT, UNITS, Action, Cycle, Exchange, Options
from torch_ext.parallel.fsdp.grad_shards import GradShards
from torch_ext.parallel.fsdp.reduce_scatter import REDUCE, Reduction, UnitCommunicators, UnitPlan, wire_of

# How many units' gradients are in flight at a time. More would pile up in memory if computation is faster than the
# link; and a unit is large enough to keep the link busy while the next one is prepared.
UNITS_IN_FLIGHT = 2


class Given(NamedTuple):
    """The arguments with which FSDP2 hands over a unit's gradients (`FSDPReducer.reduce_scatter`)."""

    unit: UnitPlan
    output: torch.Tensor
    gradients: torch.Tensor
    group: dist.ProcessGroup
    allocated_on: tuple[Stream, ...]


class UnitExchange(Exchange):
    """Runs the gradient exchange for one FSDPReducer's parameters."""

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        units: Sequence[UnitPlan],
        unit_of: Sequence[int],
        control: Communicator,
        number: int,
        divide_factor: float | None,
        check_for_nan: bool,
        find_unused: bool,
    ) -> None:
        """The arguments are those of FSDPReducer."""
        options = Options(
            UNITS, control.rank, control.world_size, UNITS_IN_FLIGHT, check_for_nan, find_unused=find_unused
        )
        self.cycle = Cycle(options, names, units=[str(unit) for unit in units])
        self.params, self.names = params, names
        self.communicators = UnitCommunicators(control, number)
        self.shards = GradShards(params, units, unit_of)
        self.current: Reduction | None = None
        """The reduction from whose output FSDP2 is setting gradients now."""
        self._divide_factor, self._check_for_nan, self._find_unused = divide_factor, check_for_nan, find_unused
        self.sent = self.communicators.sent
        self._reset()

    def _reset(self) -> None:
        self._given: Given | None = None  # not sent yet
        self._reductions: list[Reduction] = []  # all of this backward
        self._messages: list[Reduction] = []  # those of them that were sent, by message
        self._read_reports: Callable[[], list[torch.Tensor]] | None = None  # waits for the ranks' reports

    def begin(self) -> None:
        """Starts a backward."""
        self.cycle.begin()
        self.sent.begin_backward()
        self._reset()

    def give(self, given: Given) -> None:
        """Takes a unit's gradients and sends them, after waiting for earlier units if too many are in flight."""
        self.current, self._given = None, given
        self.cycle.given(given.unit.number, given.gradients.numel())
        self.run()

    def unit_reduced(self, unit: UnitPlan, output: torch.Tensor) -> None:
        """FSDP2 has reduced a unit, all-reduce included, and sets gradients from output next."""
        last = self._reductions[-1] if self._reductions else None
        if last is None or last.output is not output:
            # If one rank has the whole unit, FSDP2 calls no reduce-scatter.
            sums = torch.empty(output.numel(), dtype=self.shards.dtype_of_sums(unit), device=output.device)
            reduce_chunks([WireBuffer.of(output)], sums, self._scale(unit, 1))
            last = Reduction(unit, output, sums, None)
            self.cycle.given(unit.number, output.numel(), message=False)
            self._add(last, output, output.view(1, -1))
        self.current = last

    def _add(self, reduction: Reduction, given: torch.Tensor, rows: torch.Tensor) -> None:
        if self._check_for_nan and first_nonfinite([given]) != ALL_FINITE:
            reduction.suspect = rows
        self._reductions.append(reduction)

    def _frozen_since(self) -> str:
        """Returns a text for error messages: a rank that froze parameters reduces less, and others may wait for it."""
        frozen = [name for name, p in zip(self.names, self.params, strict=True) if not p.requires_grad]
        return f", with {names_of(frozen, range(len(frozen)))} frozen since parallelize" if frozen else ""

    def refuse(self, unit: UnitPlan, output: torch.Tensor, op: dist.ReduceOp) -> None:
        """Raises RuntimeError if FSDP2 itself would scale the sums, or add up replicas in less than fp32."""
        if op != dist.ReduceOp.AVG:
            raise RuntimeError(
                f"{unit}: FSDP2 would scale the sum of its gradients itself, in {output.dtype} "
                "(set_gradient_divide_factor, set_force_sum_reduction_for_comms, or a reduction in float16): give "
                "gradient_divide_factor to parallelize, and MixedPrecisionPolicy(reduce_dtype=torch.float32) to "
                "fully_shard"
            )
        if unit.replicas > 1 and output.dtype != torch.float32:
            raise RuntimeError(
                f"{unit}: FSDP2 would add up the {unit.replicas} replicas in {output.dtype}: give "
                "MixedPrecisionPolicy(reduce_dtype=torch.float32) to fully_shard; the wire between shards is still the "
                "policy's"
            )

    def _scale(self, unit: UnitPlan, shards: int) -> float:
        # FSDP2 divides by the number of replicas: it takes their mean.
        return 1.0 / shards if self._divide_factor is None else unit.replicas / self._divide_factor

    # -- the cycle's actions (`CycleDriver.run`) ------------------------------------------------------------------

    def do_send(self, action: Action) -> bool:
        """Sends the given unit. Returns whether the sums are written already."""
        assert self._given is not None
        (unit, output, given, group, allocated_on), self._given = self._given, None
        cycle, communicator = self.cycle.number, self.communicators.of(group, REDUCE)
        communicator.ordering.record_producer(*allocated_on)
        rows = given.view(communicator.world_size, -1)
        wire = wire_of(unit, rows, communicator.rank, cycle)
        numel = wire.data.numel() // communicator.world_size
        replicated = unit.replicas > 1
        dtype = output.dtype if replicated else self.shards.dtype_of_sums(unit)
        in_place = dtype == output.dtype and numel == output.numel()
        sums = output if in_place else torch.empty(numel, dtype=dtype, device=output.device)
        send = partial(
            communicator.reduce_scatter,
            wire,
            partial(_add_up, sums, self._scale(unit, communicator.world_size)),
            tag=self.communicators.tag(cycle, REDUCE, unit, given.nbytes),
            label=f"gradients of cycle {cycle}, {unit}{self._frozen_since()}",
        )
        reduction = Reduction(unit, output, output if replicated else sums, send())
        self._messages.append(reduction)
        if replicated:
            reduction.wait(self.guarded)
            if not in_place:
                output.copy_(sums[: output.numel()])
        self._add(reduction, given, rows)
        return replicated

    def do_wait(self, action: Action) -> None:
        if action.flags & IF_SENT and action.message >= len(self._messages):
            return
        reduction = self._messages[action.message]
        if action.flags & DISCARD:
            reduction.wait(self.guarded)
        elif not reduction.is_added:
            self.shards.add_sums(reduction, self.guarded)

    def do_report(self, _action: Action) -> None:
        nonfinite = next((n for r in self._reductions if (n := r.first_nonfinite()) != ALL_FINITE), ALL_FINITE)
        report = self.cycle.report(nonfinite, [p.requires_grad for p in self.params])
        cycle = self.cycle.number
        number, label = self.communicators.report_tag(cycle), f"end of gradient cycle {cycle}{self._frozen_since()}"
        control = self.communicators.control
        self._read_reports = self.guarded(lambda: control.all_gather_bytes(report, tag=number, label=label))

    def do_read(self, _action: Action) -> None:
        assert self._read_reports is not None
        # Gradients that FSDP2 keeps back (set_requires_all_reduce) are reduced in a later backward.
        self.cycle.read(self.guarded(self._read_reports), held_back=not all(r.slices for r in self._reductions))

    def do_install(self, _action: Action) -> None:
        for reduction in self._reductions:
            if not reduction.is_added:
                self.shards.add_sums(reduction, self.guarded)
        if self._find_unused:
            self.shards.drop_new(i for i, has_one in enumerate(self.cycle.anywhere()) if not has_one)
        self.shards.attach_grads()
        self._reductions, self._messages = [], []

    def do_recovered(self, _action: Action) -> None:
        self.current = None
        self._reset()
        self.shards.attach_grads()
        self.cycle.broken(self.shards.added)


def _add_up(sums: torch.Tensor, scale: float, chunks: Sequence[WireBuffer], _part: Part) -> None:
    reduce_chunks(chunks, sums, scale)
