"""Wire buffers, the form in which buckets are sent: plain elements, or 8-bit codes with one power-of-two scale byte per
128 codes."""

import ctypes
import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_ext.native import constants, dtypes, library, ops
from torch_ext.native.constants import BLOCK

CODES = torch.uint8  # the dtype of an 8-bit wire: e4m3 codes with e8m0 scales

# Seeds of the rounding thresholds. Ranks need different thresholds: with equal ones the mean would not reduce their
# rounding errors. For the same reason gradients and their sums need different ones.
_SEED_OF_PARTS, _SEED_OF_SUMS = 0x5EED_0000_0000, 0x5EED_8000_0000


@functools.cache
def gather_dtype(chosen: torch.dtype | None, wire: torch.dtype) -> torch.dtype:
    """Returns the dtype in which sums are all-gathered (tx_gather_dtype). chosen: the policy's grad_gather_dtype."""
    decide = library.function("tx_gather_dtype", ctypes.c_int32, ctypes.c_int32, restype=ctypes.c_int32)
    found = dtypes.dtype_of(decide(0 if chosen is None else dtypes.code_of(chosen), dtypes.code_of(wire)))
    assert found is not None
    return found


class WireBuffer(NamedTuple):
    """A buffer of numel elements: fp32, bf16 or fp16 without scales, or 8-bit codes with numel / 128 scales."""

    data: Tensor
    scales: Tensor

    @classmethod
    def of(cls, data: Tensor) -> "WireBuffer":
        """Returns a buffer of plain elements that shares the memory of `data`."""
        return cls(data, data.new_empty(0, dtype=torch.uint8))

    @classmethod
    def empty(cls, numel: int, dtype: torch.dtype, device: torch.device) -> "WireBuffer":
        """Returns an uninitialised buffer. numel: a multiple of 128 for codes."""
        blocks = numel // BLOCK if dtype == CODES else 0
        return cls(
            torch.empty(numel, dtype=dtype, device=device), torch.empty(blocks, dtype=torch.uint8, device=device)
        )

    @staticmethod
    def size_of(numel: int, dtype: torch.dtype) -> int:
        """Returns the bytes of so many elements, including the scales of codes."""
        return numel * dtype.itemsize + (numel // BLOCK if dtype == CODES else 0)

    @property
    def nbytes(self) -> int:
        return int(self.data.nbytes + self.scales.nbytes)

    @property
    def coded(self) -> bool:
        return self.scales.numel() > 0

    def parts(self, world_size: int) -> "list[WireBuffer]":
        """Returns a view of each rank's part; numel must be a multiple of 128 * world_size."""
        datas = self.data.chunk(world_size) if self.data.numel() else [self.data] * world_size
        if not self.coded:
            return [WireBuffer(data, self.scales) for data in datas]
        return [WireBuffer(data, scale) for data, scale in zip(datas, self.scales.chunk(world_size), strict=True)]

    def part(self, rank: int, world_size: int) -> "WireBuffer":
        """Returns a view of one rank's part."""
        numel = self.data.numel() // world_size
        return self.run(rank * numel, numel)

    def run(self, begin: int, numel: int) -> "WireBuffer":
        """Returns a view of the elements [begin, begin + numel); both are multiples of 128 for codes."""
        end = begin + numel
        scales = self.scales[begin // BLOCK : end // BLOCK] if self.coded else self.scales
        return WireBuffer(self.data[begin:end], scales)

    def messages(self) -> list[Tensor]:
        """Returns the tensors to send or receive, as bytes, in this order."""
        return [self.data.view(torch.uint8), self.scales] if self.coded else [self.data.view(torch.uint8)]


class ParamSlice(NamedTuple):
    """Consecutive elements of one parameter in a bucket, or in a part of one."""

    param: int  # the parameter's position in the plan
    first: int  # index of the first element in the parameter
    numel: int
    at: int  # offset of the first element in the bucket or part; a multiple of 128


class RoundingSeeds(NamedTuple):
    """What the rounding thresholds of an 8-bit wire depend on, besides the parameter and the element's index."""

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
    """Writes values (fp32, bf16 or fp16, each contiguous, of its piece's numel) to the wire. Elements of the wire that
    no piece covers become zero.

    ids: the id (tx_param_id) of each parameter of the plan. The thresholds by which codes are rounded depend on the
    parameter and the element's index, not on the bucket, so the bits are the same for every bucket size.
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
    """Writes the whole wire to a flat tensor of as many elements, rounded to nearest."""
    begin = torch.zeros(1, dtype=torch.int64, device="cpu")
    ops.call("bucket_unpack_", wire.data, wire.scales, begin, [tensor])


def reduce_chunks(
    chunks: Sequence[WireBuffer], shard: Tensor, scale: float, *, accumulate: bool = False, stats: Tensor | None = None
) -> None:
    """Computes shard = sum of the chunks in rank order * scale, or with `accumulate` shard += that; in fp32, rounded to
    the shard's dtype.

    shard: fp32, bf16 or fp16, of a chunk's numel; it shares no memory with a chunk. stats: int64 [21], to which the
    statistics of the shard's new content (grad_stats_) are added.
    """
    scales = [c.scales for c in chunks] if chunks[0].coded else []
    none = torch.empty(0, dtype=torch.int64, device=shard.device)
    given = none if stats is None else stats
    ops.call("bucket_reduce_", [c.data for c in chunks], scales, shard, given, scale, accumulate)
