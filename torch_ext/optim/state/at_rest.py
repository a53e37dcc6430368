"""State tensors in their stored form (8-bit moments, remainders), for checkpoints that keep that form."""

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
    """A range of a block-scaled moment, in memory order, extended to whole blocks at both ends."""

    codes: Tensor
    scales: Tensor
    """uint8: one for each block of codes."""
    format: int
    """constants.FORMAT_*."""
    skip: int
    """How many codes come before the first element of the range."""


def scaled_of(t: Tensor) -> Scaled | None:
    """Returns views of the stored codes and scales of t. None where t is not block-scaled, its elements are not
    contiguous in the store, or some writes to it are still pending."""
    if not isinstance(t, StateTensor | ChunkTensor) or not isinstance(t.handle.source, EncodedState):
        return None
    source = t.handle.source
    begin, end = t.stored_range() if isinstance(t, ChunkTensor) else (0, source.numel)
    return None if source.pending else _blocks(source, begin, end, t.numel())


def _blocks(source: EncodedState, begin: int, end: int, numel: int) -> Scaled | None:
    """Returns the blocks that hold elements [begin, end). None where the state is not block-scaled, the range is empty,
    or it has other elements than the `numel` wanted ones."""
    if source.key not in FORMATS or end - begin != numel or begin == end:
        return None
    first, last = begin // constants.BLOCK, -(-end // constants.BLOCK)
    codes = dense.flat(source.state[source.key]).view(-1)[first * constants.BLOCK : last * constants.BLOCK]
    scales = codec.scales_of(source.state, source.kinds, source.key)[first:last]
    return Scaled(codes, scales, FORMATS[source.key], begin - first * constants.BLOCK)


def assign_blocks(t: Tensor, found: Scaled) -> bool:
    """Copies the blocks of `found`, which has the elements of t in the same memory order, to t. The result is that of
    decoding and encoding them. Returns False, and writes nothing, where t has no blocks of the same form.

    Grains (see EncodedState) of which t has only a part are written as decoded values."""
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
            source.write(begin + part.start, decode_blocks(edge, part.stop - part.start))
    return True


def _own_blocks(t: Tensor) -> Scaled | None:
    """Returns views of the blocks of a chunk that begins and ends at block boundaries; None for any other tensor."""
    if not isinstance(t, ChunkTensor) or not isinstance(t.handle.source, EncodedState):
        return None
    found = _blocks(t.handle.source, *t.stored_range(), t.numel())
    return found if found is not None and found.skip == 0 and found.codes.numel() == t.numel() else None


def decode_blocks(found: Scaled, numel: int) -> Tensor:
    """Returns the `numel` elements of the range, fp32 and flat. RuntimeError or TypeError where codes and scales do not
    fit each other."""
    values = torch.empty(found.codes.numel(), dtype=torch.float32, device="cpu")
    options = (dense.EMPTY, found.format, constants.NEAREST, 0, 0)
    ops.call("cast_", [found.codes], [values], [found.scales], [], *options)
    return values[found.skip : found.skip + numel]


class Remainder(NamedTuple):
    """An fp32 master, stored without loss as the bits that its bf16 weight lacks, in memory order."""

    remainder: Tensor
    """int16, as master_encode_ makes it."""
    exceptions: Tensor
    """int64: indices of elements that weight and remainder do not give exactly: one in 10^5, and where the weight was
    modified outside the optimizer."""
    bits: Tensor
    """int32: the bits of these elements."""


def encode_remainder(master: Tensor, weight: Tensor) -> Remainder | None:
    """Encodes a master by its weight, both flat; None where many elements do not round to their weights."""
    rounded, remainder = weight.clone(), torch.empty_like(master, dtype=torch.int16)
    ops.call("master_encode_", [master], [rounded], [remainder])
    none = torch.empty(0, dtype=torch.int64, device="cpu")
    made = master_of(weight, Remainder(remainder, none, none.to(torch.int32)))
    exceptions = (made.view(torch.int32) != master.view(torch.int32)).nonzero().view(-1)
    if exceptions.numel() > master.numel() // 64:
        return None
    return Remainder(remainder, exceptions, master.view(torch.int32)[exceptions])


def master_of(weight: Tensor, found: Remainder) -> Tensor:
    """Returns the master, flat. IndexError where `exceptions` has an index outside of it."""
    master = torch.empty_like(weight, dtype=torch.float32)
    ops.call("master_decode_", [weight], [found.remainder], [master])
    master.view(torch.int32)[found.exceptions] = found.bits
    return master
