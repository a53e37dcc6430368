"""The reduce-scatter of one FSDP2 unit: where its sum is written, which gradients it contains, its communicators."""

import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torch_ext.comm.communicator import MAX_BUCKETS, Communicator, Work, tag
from torch_ext.comm.factory import make_communicator
from torch_ext.comm.streams import Stream
from torch_ext.comm.wire import CODES, ParamSlice, RoundingSeeds, WireBuffer, pack
from torch_ext.grads.stats import ALL_FINITE, first_nonfinite
from torch_ext.native.constants import BLOCK
from torch_ext.parallel.sent_bytes import SentBytes


class UnitPlan(NamedTuple):
    """A unit's settings, fixed before its first gradient."""

    number: int
    name: str
    main_grads_dtype: torch.dtype
    grad_comm_dtype: torch.dtype
    replicas: int
    """How many replicas of each shard there are. If several (HSDP), FSDP2 itself adds up their gradients."""

    def __str__(self) -> str:
        return unit_called(self.name)


def unit_called(*names: str) -> str:
    """Returns the text that names a unit in error messages, from its modules' names; the root's name is empty."""
    return "the root's unit" if names == ("",) else f"unit {', '.join(map(repr, names))}"


class Slice(NamedTuple):
    """The gradient of one parameter's shard in a reduction's output, padded to the largest rank's shard."""

    param: int
    begin: int
    grad: Any
    """The `.grad` that FSDP2 set: a DTensor over the reduction's output, or over a copy in the parameter's dtype."""


class Reduction:
    """One reduce-scatter of a unit, created when FSDP2 hands over the unit's gradients. The hooks that FSDP2 calls next
    tell which parameters these belong to."""

    def __init__(self, unit: UnitPlan, output: Tensor, sums: Tensor, handle: Work | None) -> None:
        """output: where FSDP2 expects the sum. sums: where it is written, flat, of output's numel; maybe output itself.
        handle: to wait for the sum; None if it is written already."""
        self.unit, self.output, self.sums, self.handle = unit, output, sums, handle
        self.slices: list[Slice] = []
        self.is_added = False
        """Whether the sums have been added to the gradient shards."""
        self.suspect: Tensor | None = None
        """This rank's gradients, [ranks, output's numel], kept only if one of their elements is not finite."""

    def add(self, param: int, begin: int, grad: Any) -> None:
        """Records that, according to FSDP2, the gradient of the parameter's shard begins at element `begin`."""
        self.slices.append(Slice(param, begin, grad))

    def wait(self, guarded: Callable[[Callable[[], None]], None]) -> None:
        """Waits until the sums are written. guarded: calls its argument and records a failure."""
        if self.handle is not None:
            guarded(self.handle.result)
            self.handle = None

    def sum_of(self, one: Slice, shape: torch.Size) -> Tensor:
        """Returns a view of the slice's sum in the shape of the shard."""
        return self.sums[one.begin : one.begin + shape.numel()].view(shape)

    def first_nonfinite(self) -> int:
        """Returns the first parameter whose gradient on this rank is not finite, or ALL_FINITE."""
        if self.suspect is None:
            return ALL_FINITE
        ordered = sorted(self.slices, key=lambda one: one.begin)
        ends = [one.begin for one in ordered[1:]] + [self.suspect.shape[1]]
        found = first_nonfinite(
            [self.suspect[:, one.begin : end].contiguous() for one, end in zip(ordered, ends, strict=True)]
        )
        return ALL_FINITE if found == ALL_FINITE else ordered[found].param


GATHER, REDUCE = "gather", "reduce"
"""Purposes of communicators. Each has a communicator and streams of its own. But over one process group both use the
same NCCL communicator and its stream: an all-gather then waits for the reductions started before it, unless the policy
sets create_all_gather_group."""


class UnitCommunicators:
    """The communicators of all units, by process group and purpose."""

    def __init__(self, control: Communicator, number: int) -> None:
        """control: a communicator of all ranks that have parts of the model. number: from `agree`."""
        self.control = control
        self._number = number
        self._made: dict[tuple[dist.ProcessGroup, str], Communicator] = {}
        self.sent = SentBytes([control], self._made.values())

    def of(self, group: dist.ProcessGroup, purpose: str) -> Communicator:
        if (group, purpose) not in self._made:
            made = make_communicator(
                group, self.control.device, self.control.transport_name, self.control.create_all_gather_group
            )
            made.compresses = self.control.compresses
            self._made[group, purpose] = made
        return self._made[group, purpose]

    def current_stream(self) -> Stream:
        """Returns the device's current stream, on which memory is allocated now."""
        return self.control.ordering.streams.current()

    def tag(self, cycle: int, purpose: str, unit: UnitPlan, nbytes: int) -> int:
        """Returns the tag of a unit's message. It depends on the size, too: if ranks disagreed about the size under one
        tag, gloo would end the process."""
        return tag(self._number, cycle, zlib.crc32(f"{purpose} {unit.number} {nbytes}".encode()) % MAX_BUCKETS)

    def report_tag(self, cycle: int) -> int:
        return tag(self._number, cycle, MAX_BUCKETS)


def wire_of(unit: UnitPlan, rows: torch.Tensor, rank: int, cycle: int) -> WireBuffer:
    """Returns a unit's gradients as they are sent: `rows` itself, or a copy if the wire's dtype is narrower. With 8-bit
    codes, each rank's part is padded to whole blocks.

    rows: [ranks, elements of a shard], contiguous. rank, cycle: for the rounding thresholds of an 8-bit wire.
    """
    world_size, numel = rows.shape
    dtype = unit.grad_comm_dtype
    if dtype.itemsize >= rows.dtype.itemsize:
        return WireBuffer.of(rows.view(-1))
    if dtype != CODES:
        wire = WireBuffer.of(torch.empty(rows.numel(), dtype=dtype, device=rows.device))
        pack([rows.view(-1)], [ParamSlice(0, 0, rows.numel(), 0)], [0], wire, RoundingSeeds(0, 0))
        return wire
    padded = -(-numel // BLOCK) * BLOCK
    codes, scales = world_size * padded, world_size * padded // BLOCK
    wire = WireBuffer(rows.new_empty(codes, dtype=CODES), rows.new_empty(scales, dtype=torch.uint8))
    pieces = [ParamSlice(0, r * padded, numel, r * padded) for r in range(world_size)]
    pack(list(rows.unbind()), pieces, [unit.number], wire, RoundingSeeds.of_parts(rank, cycle))
    return wire
