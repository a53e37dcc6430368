"""Reads and writes ranges of a logical state tensor, whatever form it is stored in.

Ranges [begin, end) count the elements that this rank has, in memory order. Values are contiguous and one-dimensional.
"""

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from torch_ext.optim.state import codec
from torch_ext.optim.state.state_dtypes import FORMATS, GRAIN, StateDtypes
from torch_ext.tensors import dense
from torch_ext.tensors.offload_guard import check_present

_RANGE = 1 << 17  # the largest number of elements that are decoded or encoded at a time
assert _RANGE % GRAIN == 0

_WHAT = "an optimizer state that was handed out before"  # for messages


class PlainState:
    """The source of a tensor that is stored in its logical form."""

    lossy = False
    """Whether a write has lost bits: what is read now differs from what was written."""

    def __init__(self, flat: Tensor) -> None:
        """flat: the elements, contiguous, of one dimension."""
        self.flat = flat

    @property
    def dtype(self) -> torch.dtype:
        return self.flat.dtype

    @property
    def device(self) -> torch.device:
        return self.flat.device

    @property
    def numel(self) -> int:
        return self.flat.numel()

    def read(self, begin: int, end: int) -> Tensor:
        """Returns a view."""
        return check_present(self.flat, _WHAT)[begin:end]

    def write(self, begin: int, values: Tensor) -> None:
        check_present(self.flat, _WHAT)[begin : begin + values.numel()].copy_(values)

    def flush(self) -> None:
        """Does nothing: writes are never pending here."""

    def is_in(self, stored: Mapping[str, Any], key: str) -> bool:
        """Whether this reads and writes `key` of this stored state."""
        own = stored.get(key)
        return (
            isinstance(own, Tensor)
            and own.data_ptr() == self.flat.data_ptr()
            and own.numel() == self.numel
            and own.dtype == self.dtype
        )


class EncodedState:
    """The source of a tensor that is encoded: decodes elements when they are read, encodes them when they are written.

    GRAIN elements (a grain) are encoded together. If a write covers only a part of a grain, its values are pending
    until the rest of the grain is written, or until `flush`.
    """

    dtype = torch.float32

    def __init__(self, weight: Tensor, state: dict[str, Tensor], kinds: StateDtypes, key: str) -> None:
        """weight: the elements to which the state belongs, in its memory order. state: stored, without the step."""
        self.weight, self.state, self.kinds, self.key = weight, state, kinds, key
        self.lossy = False
        self._pending: dict[int, tuple[Tensor, Tensor]] = {}  # by grain: values, and a mask of those written

    @property
    def pending(self) -> bool:
        """Whether some of what was written is not in the stored state yet."""
        return bool(self._pending)

    @property
    def device(self) -> torch.device:
        return self.state[self.kinds.first].device  # may be the host while the weight is on a device

    @property
    def numel(self) -> int:
        return self.weight.numel()

    def _slice(self, begin: int, end: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the weight and views of the stored state for [begin, end). See `codec.state_slice`."""
        check_present(self.state[self.kinds.first], _WHAT)
        weight = dense.flat(check_present(self.weight, _WHAT)).view(-1)[begin:end].to(self.device)
        return weight, codec.state_slice(self.state, self.kinds, begin, end)

    def read(self, begin: int, end: int) -> Tensor:
        """Returns decoded values in new memory, pending ones included."""
        first, last = begin // GRAIN * GRAIN, min(-(-end // GRAIN) * GRAIN, self.numel)
        weight, state = self._slice(first, last)
        values = codec.decode(weight, state, self.kinds, self.key)
        for grain, (pending, written) in self._pending.items():
            at = grain * GRAIN - first
            if 0 <= at < last - first:
                values[at : at + written.numel()][written] = pending[written]
        return values[begin - first : end - first]

    def write(self, begin: int, values: Tensor) -> None:
        """Encodes the whole grains in the range, and keeps the values at its ends as pending."""
        end = begin + values.numel()
        # [first, last) are the whole grains of the range. If there is none, all values go to _write_part.
        first = -(-begin // GRAIN) * GRAIN
        last = end if end == self.numel else end // GRAIN * GRAIN
        if first >= last:
            first = last = end
        for at, stop in (*_cut(begin, first, GRAIN), *_cut(last, end, GRAIN)):
            self._write_part(at, values[at - begin : stop - begin])
        for at, stop in _cut(first, last, _RANGE):
            self._encode(at, values[at - begin : stop - begin])

    def _write_part(self, begin: int, values: Tensor) -> None:
        """Keeps values of a part of one grain, and encodes the grain once all of it is written."""
        grain, at = divmod(begin, GRAIN)
        if grain not in self._pending:
            size = min(GRAIN, self.numel - grain * GRAIN)
            new = torch.zeros(size, dtype=self.dtype, device=self.device)
            self._pending[grain] = new, torch.zeros(size, dtype=torch.bool, device=self.device)
        pending, written = self._pending[grain]
        pending[at : at + values.numel()] = values
        written[at : at + values.numel()] = True
        if bool(written.all()):
            self._encode(grain * GRAIN, pending)

    def _encode(self, begin: int, values: Tensor) -> None:
        """Encodes values of whole grains."""
        end = begin + values.numel()
        for grain in [g for g in self._pending if begin <= g * GRAIN < end]:
            del self._pending[grain]
        weight, state = self._slice(begin, end)
        values = values.to(device=self.device, dtype=self.dtype)
        codec.encode(weight, state, self.kinds, self.key, values)
        if self.key == "master_param":  # the write went to slices of the state: tells a weight publisher of it
            torch.autograd.graph.increment_version([self.state["checksum"]])
        if self.key in FORMATS:  # not for masters: weight and remainder together are as good as exact
            self.lossy = self.lossy or not same_values(values, self.read(begin, end))

    def flush(self) -> None:
        """Encodes all pending values, because no more writes will come."""
        for grain in list(self._pending):
            begin, end = grain * GRAIN, min((grain + 1) * GRAIN, self.numel)
            self._encode(begin, self.read(begin, end))

    def is_in(self, stored: Mapping[str, Any], key: str) -> bool:
        """Whether this reads and writes `key` of this stored state."""
        return key == self.key and bool(self.state) and all(stored.get(k) is v for k, v in self.state.items())


Source: TypeAlias = PlainState | EncodedState


def source_of(weight: Tensor, stored: Mapping[str, Any], kinds: StateDtypes, key: str) -> Source:
    """Returns the source of the logical tensor `key` (one of `kinds.logical()`). weight: see EncodedState."""
    if kinds.logical()[key]:
        return EncodedState(weight, {k: value for k, value in stored.items() if k != "step"}, kinds, key)
    return PlainState(dense.flat(stored[key]).view(-1))


def ranges(source: Source) -> Iterator[tuple[int, Tensor]]:
    """Yields all elements, range by range: the range's first index, and its values."""
    for begin, end in _cut(0, source.numel, _RANGE):
        yield begin, source.read(begin, end)


def _cut(begin: int, end: int, step: int) -> Iterator[tuple[int, int]]:
    """Yields [begin, end) in pieces, cut at multiples of step."""
    while begin < end:
        stop = min((begin // step + 1) * step, end)
        yield begin, stop
        begin = stop


def same_values(a: Tensor, b: Tensor) -> bool:
    """Whether all values are equal. NaN equals NaN, and 0 equals -0."""
    a, b = a.to(torch.float32), b.to(torch.float32)
    return torch.equal(a, b) or torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True)
