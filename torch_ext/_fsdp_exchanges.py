"""The exchanges of a sharded model: one for each process group and purpose, and the tags of what they send."""

import zlib

import torch
import torch.distributed as dist

from torch_ext._exchange import MAX_BUCKETS, Exchange, exchange_over, tag
from torch_ext._fsdp_reduction import UnitPlan
from torch_ext._header import BLOCK
from torch_ext._streams import Stream
from torch_ext._wire import CODES, Piece, Seeds, Wire, pack

GATHER, REDUCE = "gather", "reduce"
"""Purposes: each has streams of its own for what it does itself. Over one group both share its communicator, and so its
stream: a gather waits for the reductions that were started before it."""


class Exchanges:
    def __init__(self, control: Exchange, number: int) -> None:
        """control: between all ranks that hold parts of the model. number: of `agree`."""
        self.control = control
        self._number = number
        self._made: dict[tuple[dist.ProcessGroup, str], Exchange] = {}

    def of(self, group: dist.ProcessGroup, purpose: str) -> Exchange:
        if (group, purpose) not in self._made:
            made = exchange_over(group, self.control.device, self.control.transport_name)
            made.compresses = self.control.compresses
            self._made[group, purpose] = made
        return self._made[group, purpose]

    def current_stream(self) -> Stream:
        """Of the device: whose memory is what is allocated now."""
        return self.control.ordering.streams.current()

    def tag(self, cycle: int, purpose: str, unit: UnitPlan, nbytes: int) -> int:
        """Depends on the size, too: a message of another size than is expected would end a gloo process."""
        return tag(self._number, cycle, zlib.crc32(f"{purpose} {unit.number} {nbytes}".encode()) % MAX_BUCKETS)

    def report_tag(self, cycle: int) -> int:
        return tag(self._number, cycle, MAX_BUCKETS)

    def bytes_sent(self) -> int:
        return self.control.bytes_sent + sum(e.bytes_sent for e in self._made.values())


def wire_of(unit: UnitPlan, rows: torch.Tensor, rank: int, cycle: int) -> Wire:
    """A unit's gradients as they travel: themselves, unless the wire's dtype is a narrower one. Of 8-bit codes, each
    rank's part is padded to whole blocks.

    rows: [ranks, elements of a shard], contiguous. rank, cycle: for the thresholds of an 8-bit wire.
    """
    world_size, numel = rows.shape
    dtype = unit.grad_comm_dtype
    if dtype.itemsize >= rows.dtype.itemsize:
        return Wire.of(rows.view(-1))
    if dtype != CODES:
        wire = Wire.of(torch.empty(rows.numel(), dtype=dtype, device=rows.device))
        pack([rows.view(-1)], [Piece(0, 0, rows.numel(), 0)], [0], wire, Seeds(0, 0))
        return wire
    padded = -(-numel // BLOCK) * BLOCK
    codes, scales = world_size * padded, world_size * padded // BLOCK
    wire = Wire(rows.new_empty(codes, dtype=CODES), rows.new_empty(scales, dtype=torch.uint8))
    pieces = [Piece(0, r * padded, numel, r * padded) for r in range(world_size)]
    pack(list(rows.unbind()), pieces, [unit.number], wire, Seeds.of_parts(rank, cycle))
    return wire
