"""The reduce-scatter of one unit of FSDP2: where its sum goes, which gradients lie in it, and over what it is sent."""

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


class UnitPlan(NamedTuple):
    """What is decided about a unit before its first gradient."""

    number: int
    name: str
    main_grads_dtype: torch.dtype
    grad_comm_dtype: torch.dtype
    replicas: int
    """How many there are of each shard; more than one: FSDP2 itself adds up their gradients (HSDP)."""

    def __str__(self) -> str:
        return unit_called(self.name)


def unit_called(*names: str) -> str:
    """A unit in messages, by its modules' names; the model's own is empty."""
    return "the root's unit" if names == ("",) else f"unit {', '.join(map(repr, names))}"


class Slice(NamedTuple):
    """The gradient of one parameter's shard in a reduction, padded as all ranks' are."""

    param: int
    begin: int
    grad: Any
    """What FSDP2 made of it: a DTensor over the reduction's output, or over a copy in the parameter's dtype."""


class Reduction:
    """Begins when FSDP2 hands over a unit's gradients; the hooks that it calls next tell which these are."""

    def __init__(self, unit: UnitPlan, output: Tensor, sums: Tensor, handle: Work | None) -> None:
        """output: where FSDP2 expects the sum. sums: where it will be, flat, of output's numel; maybe output itself."""
        self.unit, self.output, self.sums, self.handle = unit, output, sums, handle
        self.slices: list[Slice] = []
        self.is_added = False
        """Whether the sums were added to the gradient shards."""
        self.suspect: Tensor | None = None
        """What this rank passed in, [ranks, output's numel], where an element of it is not finite."""

    def add(self, param: int, begin: int, grad: Any) -> None:
        """The gradient of the parameter's shard begins there, according to FSDP2."""
        self.slices.append(Slice(param, begin, grad))

    def wait(self, guarded: Callable[[Callable[[], None]], None]) -> None:
        """Until the sums are written. guarded: calls its argument."""
        if self.handle is not None:
            guarded(self.handle.result)
            self.handle = None

    def sum_of(self, one: Slice, shape: torch.Size) -> Tensor:
        """A view."""
        return self.sums[one.begin : one.begin + shape.numel()].view(shape)

    def first_nonfinite(self) -> int:
        """The parameter whose gradient on this rank is not finite, or ALL_FINITE."""
        if self.suspect is None:
            return ALL_FINITE
        ordered = sorted(self.slices, key=lambda one: one.begin)
        ends = [one.begin for one in ordered[1:]] + [self.suspect.shape[1]]
        found = first_nonfinite(
            [self.suspect[:, one.begin : end].contiguous() for one, end in zip(ordered, ends, strict=True)]
        )
        return ALL_FINITE if found == ALL_FINITE else ordered[found].param


GATHER, REDUCE = "gather", "reduce"
"""Purposes: each has a communicator, and streams, of its own. Over one group both share NCCL's, and so its stream: a
gather waits for the reductions that were started before it, unless the policy says create_all_gather_group."""


class UnitCommunicators:
    """The communicators of all units, by process group and purpose."""

    def __init__(self, control: Communicator, number: int) -> None:
        """control: between all ranks that hold parts of the model. number: of `agree`."""
        self.control = control
        self._number = number
        self._made: dict[tuple[dist.ProcessGroup, str], Communicator] = {}

    def of(self, group: dist.ProcessGroup, purpose: str) -> Communicator:
        if (group, purpose) not in self._made:
            made = make_communicator(
                group, self.control.device, self.control.transport_name, self.control.create_all_gather_group
            )
            made.compresses = self.control.compresses
            self._made[group, purpose] = made
        return self._made[group, purpose]

    def current_stream(self) -> Stream:
        """Of the device: the stream on which memory is allocated now."""
        return self.control.ordering.streams.current()

    def tag(self, cycle: int, purpose: str, unit: UnitPlan, nbytes: int) -> int:
        """Depends on the size, too: a message of an unexpected size would end a gloo process."""
        return tag(self._number, cycle, zlib.crc32(f"{purpose} {unit.number} {nbytes}".encode()) % MAX_BUCKETS)

    def report_tag(self, cycle: int) -> int:
        return tag(self._number, cycle, MAX_BUCKETS)

    def bytes_sent(self) -> int:
        return self.control.bytes_sent + sum(e.bytes_sent for e in self._made.values())


def wire_of(unit: UnitPlan, rows: torch.Tensor, rank: int, cycle: int) -> WireBuffer:
    """A unit's gradients as they are sent: themselves, unless the wire's dtype is narrower. Of 8-bit codes, each rank's
    part is padded to whole blocks.

    rows: [ranks, elements of a shard], contiguous. rank, cycle: for the thresholds of an 8-bit wire.
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
