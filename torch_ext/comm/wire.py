"""A bucket as it is sent: plain elements, or 8-bit codes with one power-of-two scale byte per 128 of them."""

import ctypes
import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_ext.native import constants, dtypes, library, ops
from torch_ext.native.constants import BLOCK

CODES = torch.uint8  # the dtype of an 8-bit wire: e4m3 codes beside e8m0 scales

# The seeds of the rounding thresholds: ranks must not round alike, or the mean would not lessen their errors; nor must
# gradients and their sums.
_SEED_OF_PARTS, _SEED_OF_SUMS = 0x5EED_0000_0000, 0x5EED_8000_0000


@functools.cache
def gather_dtype(chosen: torch.dtype | None, wire: torch.dtype) -> torch.dtype:
    """What sums that every rank gets are gathered in (tx_gather_dtype). chosen: the policy's grad_gather_dtype."""
    decide = library.function("tx_gather_dtype", ctypes.c_int32, ctypes.c_int32, restype=ctypes.c_int32)
    found = dtypes.dtype_of(decide(0 if chosen is None else dtypes.code_of(chosen), dtypes.code_of(wire)))
    assert found is not None
    return found


class WireBuffer(NamedTuple):
    """numel elements of fp32, bf16 or fp16, or as many codes with numel / 128 scales (else none)."""

    data: Tensor
    scales: Tensor

    @classmethod
    def of(cls, data: Tensor) -> "WireBuffer":
        """Plain elements, where they lie."""
        return cls(data, data.new_empty(0, dtype=torch.uint8))

    @classmethod
    def empty(cls, numel: int, dtype: torch.dtype, device: torch.device) -> "WireBuffer":
        """Uninitialised. numel: a multiple of 128 for codes."""
        blocks = numel // BLOCK if dtype == CODES else 0
        return cls(
            torch.empty(numel, dtype=dtype, device=device), torch.empty(blocks, dtype=torch.uint8, device=device)
        )

    @staticmethod
    def size_of(numel: int, dtype: torch.dtype) -> int:
        """Bytes of as many elements, the scales of codes included."""
        return numel * dtype.itemsize + (numel // BLOCK if dtype == CODES else 0)

    @property
    def nbytes(self) -> int:
        return int(self.data.nbytes + self.scales.nbytes)

    @property
    def coded(self) -> bool:
        return self.scales.numel() > 0

    def parts(self, world_size: int) -> "list[WireBuffer]":
        """Views of each rank's part; numel is a multiple of 128 * world_size."""
        datas = self.data.chunk(world_size) if self.data.numel() else [self.data] * world_size
        if not self.coded:
            return [WireBuffer(data, self.scales) for data in datas]
        return [WireBuffer(data, scale) for data, scale in zip(datas, self.scales.chunk(world_size), strict=True)]

    def part(self, rank: int, world_size: int) -> "WireBuffer":
        """One of `parts`."""
        numel = self.data.numel() // world_size
        return self.run(rank * numel, numel)

    def run(self, begin: int, numel: int) -> "WireBuffer":
        """A view of elements [begin, begin + numel), both multiples of 128 for codes."""
        end = begin + numel
        scales = self.scales[begin // BLOCK : end // BLOCK] if self.coded else self.scales
        return WireBuffer(self.data[begin:end], scales)

    def messages(self) -> list[Tensor]:
        """What is sent and received, as bytes, in this order."""
        return [self.data.view(torch.uint8), self.scales] if self.coded else [self.data.view(torch.uint8)]


class ParamSlice(NamedTuple):
    """A run of elements of one parameter in a bucket, or in a part of one."""

    param: int  # its position in the plan
    first: int  # of the parameter's elements
    numel: int
    at: int  # where the run begins, from the begin of the bucket or the part; a multiple of 128


class RoundingSeeds(NamedTuple):
    """What the thresholds of an 8-bit wire depend on, besides the parameter and the index in it."""

    seed: int
    cycle: int

    @classmethod
    def of_parts(cls, rank: int, cycle: int) -> "RoundingSeeds":
        return cls(_SEED_OF_PARTS + rank, cycle)

    @classmethod
    def of_sums(cls, cycle: int) -> "RoundingSeeds":
        return cls(_SEED_OF_SUMS, cycle)


def pack(
    values: Sequence[Tensor], pieces: Sequence[ParamSlice], ids: Sequence[int], wire: WireBuffer, seeds: RoundingSeeds
) -> None:
    """values (fp32, bf16 or fp16, each contiguous, of its piece's numel) into the wire; what none covers becomes zero.

    ids: of each parameter of the plan (tx_param_id). Codes are rounded by thresholds that depend on the parameter and
    the index in it, never on the bucket: the bits are the same for every bucket size.
    """
    if not wire.coded:
        offsets = torch.tensor([p.at for p in pieces], dtype=torch.int64, device="cpu")
        ops.call("bucket_pack_", list(values), offsets, wire.data, wire.scales)
        return
    wire.data.zero_()
    wire.scales.zero_()
    codes = [wire.data[p.at : p.at + p.numel] for p in pieces]
    scales = [wire.scales[p.at // BLOCK : -(-(p.at + p.numel) // BLOCK)] for p in pieces]
    meta = torch.tensor([[ids[p.param], p.first, 0] for p in pieces], dtype=torch.int64, device="cpu").reshape(-1, 3)
    ops.call(
        "cast_",
        list(values),
        codes,
        [],
        scales,
        meta,
        constants.FORMAT_SIGNED,
        constants.DITHERED,
        seeds.seed,
        seeds.cycle,
    )


def unpack(wire: WireBuffer, tensor: Tensor) -> None:
    """The whole of the wire into a flat tensor of as many elements, rounded to nearest."""
    begin = torch.zeros(1, dtype=torch.int64, device="cpu")
    ops.call("bucket_unpack_", wire.data, wire.scales, begin, [tensor])


def reduce_chunks(
    chunks: Sequence[WireBuffer], shard: Tensor, scale: float, *, accumulate: bool = False, stats: Tensor | None = None
) -> None:
    """shard <- round(sum of the chunks in rank order * scale), in fp32; accumulate: added to what it holds.

    shard: fp32, bf16 or fp16, of a chunk's numel, sharing no memory with a chunk. stats: int64 [21], added to.
    """
    scales = [c.scales for c in chunks] if chunks[0].coded else []
    none = torch.empty(0, dtype=torch.int64, device=shard.device)
    given = none if stats is None else stats
    ops.call("bucket_reduce_", [c.data for c in chunks], scales, shard, given, scale, accumulate)
