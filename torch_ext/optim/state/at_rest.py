"""State tensors as they are stored: what a checkpoint holds that keeps them so."""

from typing import NamedTuple

import torch
from torch import Tensor

from torch_ext.native import constants, ops
from torch_ext.optim.state import codec
from torch_ext.optim.state.chunked_tensor import ChunkTensor
from torch_ext.optim.state.sources import EncodedState
from torch_ext.optim.state.state_dtypes import FORMATS, GRAIN
from torch_ext.optim.state.state_tensor import StateTensor
from torch_ext.tensors import dense


class Scaled(NamedTuple):
    """A block-scaled moment, in memory order, with the rest of the blocks in which it begins and ends."""

    codes: Tensor
    scales: Tensor
    """uint8: one for each block of codes."""
    format: int
    """constants.FORMAT_*."""
    skip: int
    """Elements before the first one that is wanted."""


def scaled_of(t: Tensor) -> Scaled | None:
    """Views of what is stored of it; None where that is something else, or lies apart."""
    if not isinstance(t, StateTensor | ChunkTensor) or not isinstance(t.handle.source, EncodedState):
        return None
    source = t.handle.source
    begin, end = t.stored_range() if isinstance(t, ChunkTensor) else (0, source.numel)
    return None if source.pending else _blocks(source, begin, end, t.numel())


def _blocks(source: EncodedState, begin: int, end: int, numel: int) -> Scaled | None:
    if source.key not in FORMATS or end - begin != numel or begin == end:
        return None
    first, last = begin // constants.BLOCK, -(-end // constants.BLOCK)
    codes = dense.flat(source.state[source.key]).view(-1)[first * constants.BLOCK : last * constants.BLOCK]
    scales = codec.scales_of(source.state, source.kinds, source.key)[first:last]
    return Scaled(codes, scales, FORMATS[source.key], begin - first * constants.BLOCK)


def assigned(t: Tensor, found: Scaled) -> bool:
    """Whether t, whose elements `found` has in the same memory order, has blocks of the same form and was given these:
    what decoding and encoding again would come to. What is in grains of which t has a part only is written as values
    (see EncodedState)."""
    own = _own_blocks(t)
    if own is None or (own.format, found.skip) != (found.format, 0) or own.codes.dtype != found.codes.dtype:
        return False
    if (own.codes.shape, own.scales.shape) != (found.codes.shape, found.scales.shape):
        return False
    source: EncodedState = t.handle.source  # type: ignore[attr-defined]
    begin, end = t.stored_range()  # type: ignore[attr-defined]
    first = -(-begin // GRAIN) * GRAIN
    last = end if end == source.numel else end // GRAIN * GRAIN
    if first >= last:
        return False
    inside, blocks = slice(first - begin, last - begin), constants.BLOCK
    own.codes[inside].copy_(found.codes[inside])
    scales = slice(inside.start // blocks, -(-inside.stop // blocks))
    own.scales[scales].copy_(found.scales[scales])
    for part in (slice(0, inside.start), slice(inside.stop, end - begin)):
        if part.start < part.stop:
            of_part = slice(part.start // blocks, -(-part.stop // blocks))
            edge = found._replace(codes=found.codes[part], scales=found.scales[of_part])
            source.write(begin + part.start, decoded(edge, part.stop - part.start))
    return True


def _own_blocks(t: Tensor) -> Scaled | None:
    """Views of the blocks of a chunk that begins with one and ends with one."""
    if not isinstance(t, ChunkTensor) or not isinstance(t.handle.source, EncodedState):
        return None
    found = _blocks(t.handle.source, *t.stored_range(), t.numel())
    return found if found is not None and found.skip == 0 and found.codes.numel() == t.numel() else None


def decoded(found: Scaled, numel: int) -> Tensor:
    """So many elements, fp32 and flat. RuntimeError or TypeError where codes and scales are not of each other."""
    values = torch.empty(found.codes.numel(), dtype=torch.float32, device="cpu")
    options = (dense.NONE, found.format, constants.NEAREST, 0, 0)
    ops.call("cast_", [found.codes], [values], [found.scales], [], *options)
    return values[found.skip : found.skip + numel]


class Remainder(NamedTuple):
    """An fp32 master beside its bf16 weight, in memory order. Every bit of it is there."""

    remainder: Tensor
    """int16, as master_encode_ makes it."""
    others: Tensor
    """int64: elements for which weight and remainder do not stand: one in 10^5, or somebody wrote to the weight."""
    bits: Tensor
    """int32: what these are."""


def beside(master: Tensor, weight: Tensor) -> Remainder | None:
    """Both flat; None where many elements do not round to their weights."""
    rounded, remainder = weight.clone(), torch.empty_like(master, dtype=torch.int16)
    ops.call("master_encode_", [master], [rounded], [remainder])
    none = torch.empty(0, dtype=torch.int64, device="cpu")
    made = master_of(weight, Remainder(remainder, none, none.to(torch.int32)))
    others = (made.view(torch.int32) != master.view(torch.int32)).nonzero().view(-1)
    if others.numel() > master.numel() // 64:
        return None
    return Remainder(remainder, others, master.view(torch.int32)[others])


def master_of(weight: Tensor, found: Remainder) -> Tensor:
    """Flat. IndexError where `others` are no elements of it."""
    master = torch.empty_like(weight, dtype=torch.float32)
    ops.call("master_decode_", [weight], [found.remainder], [master])
    master.view(torch.int32)[found.others] = found.bits
    return master
