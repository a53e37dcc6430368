"""Where the elements of a logical state tensor are, and how ranges of them are read and written.

Ranges [begin, end) are of the elements that this rank has, in memory order; values are contiguous, of one dimension.
"""

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from torch_ext.optim.state import codec
from torch_ext.optim.state.state_dtypes import FORMATS, GRAIN, StateDtypes
from torch_ext.tensors import dense
from torch_ext.tensors.offload_guard import present

_RANGE = 1 << 17  # elements that are decoded or encoded at a time where there are many
assert _RANGE % GRAIN == 0

_WHAT = "an optimizer state that was handed out before"  # for messages


class PlainState:
    """They are stored as they are."""

    lossy = False
    """Whether a value that was written is not what is read now."""

    def __init__(self, flat: Tensor) -> None:
        """flat: contiguous, of one dimension."""
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
        """A view."""
        return present(self.flat, _WHAT)[begin:end]

    def write(self, begin: int, values: Tensor) -> None:
        present(self.flat, _WHAT)[begin : begin + values.numel()].copy_(values)

    def flush(self) -> None:
        """Nothing is pending: every write is done at once."""

    def is_in(self, stored: Mapping[str, Any], key: str) -> bool:
        """Whether the elements are those of this stored state."""
        own = stored.get(key)
        return (
            isinstance(own, Tensor)
            and own.data_ptr() == self.flat.data_ptr()
            and own.numel() == self.numel
            and own.dtype == self.dtype
        )


class EncodedState:
    """They are decoded from a stored state when they are read, and encoded when they are written.

    GRAIN elements are encoded together: values of a grain that was written in part are pending until the rest is
    written, or until `flush`.
    """

    dtype = torch.float32

    def __init__(self, weight: Tensor, state: dict[str, Tensor], kinds: StateDtypes, key: str) -> None:
        """weight: of the elements that state is of, in the same memory order. state: stored, without the step."""
        self.weight, self.state, self.kinds, self.key = weight, state, kinds, key
        self.lossy = False
        self._pending: dict[int, tuple[Tensor, Tensor]] = {}  # by grain: values, and which of them were written

    @property
    def pending(self) -> bool:
        """Whether some of what was written is not in the stored state yet."""
        return bool(self._pending)

    @property
    def device(self) -> torch.device:
        return self.state[self.kinds.first].device  # maybe the host, where the weight is not

    @property
    def numel(self) -> int:
        return self.weight.numel()

    def _slice(self, begin: int, end: int) -> tuple[Tensor, dict[str, Tensor]]:
        present(self.state[self.kinds.first], _WHAT)
        weight = dense.flat(present(self.weight, _WHAT)).view(-1)[begin:end].to(self.device)
        return weight, codec.state_slice(self.state, self.kinds, begin, end)

    def read(self, begin: int, end: int) -> Tensor:
        """New memory."""
        first, last = begin // GRAIN * GRAIN, min(-(-end // GRAIN) * GRAIN, self.numel)
        weight, state = self._slice(first, last)
        values = codec.decode(weight, state, self.kinds, self.key)
        for grain, (pending, written) in self._pending.items():
            at = grain * GRAIN - first
            if 0 <= at < last - first:
                values[at : at + written.numel()][written] = pending[written]
        return values[begin - first : end - first]

    def write(self, begin: int, values: Tensor) -> None:
        end = begin + values.numel()
        # Whole grains are [first, last); where there is none, all of it is pending.
        first = -(-begin // GRAIN) * GRAIN
        last = end if end == self.numel else end // GRAIN * GRAIN
        if first >= last:
            first = last = end
        for at, stop in (*_cut(begin, first, GRAIN), *_cut(last, end, GRAIN)):
            self._write_part(at, values[at - begin : stop - begin])
        for at, stop in _cut(first, last, _RANGE):
            self._encode(at, values[at - begin : stop - begin])

    def _write_part(self, begin: int, values: Tensor) -> None:
        """values: of one grain, a part of it."""
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
        """values: of whole grains."""
        end = begin + values.numel()
        for grain in [g for g in self._pending if begin <= g * GRAIN < end]:
            del self._pending[grain]
        weight, state = self._slice(begin, end)
        values = values.to(device=self.device, dtype=self.dtype)
        codec.encode(weight, state, self.kinds, self.key, values)
        if self.key == "master_param":  # by which a publisher knows of it: what is written are slices
            torch.autograd.graph.increment_version([self.state["checksum"]])
        if self.key in FORMATS:  # a master beside its weight is as good as exact
            self.lossy = self.lossy or not same_values(values, self.read(begin, end))

    def flush(self) -> None:
        """Encodes what is pending: nothing more will be written."""
        for grain in list(self._pending):
            begin, end = grain * GRAIN, min((grain + 1) * GRAIN, self.numel)
            self._encode(begin, self.read(begin, end))

    def is_in(self, stored: Mapping[str, Any], key: str) -> bool:
        """Whether the elements are those of this stored state."""
        return key == self.key and bool(self.state) and all(stored.get(k) is v for k, v in self.state.items())


Source: TypeAlias = PlainState | EncodedState


def source_of(weight: Tensor, stored: Mapping[str, Any], kinds: StateDtypes, key: str) -> Source:
    """Of one of `kinds.logical()`. weight: see EncodedState."""
    if kinds.logical()[key]:
        return EncodedState(weight, {k: value for k, value in stored.items() if k != "step"}, kinds, key)
    return PlainState(dense.flat(stored[key]).view(-1))


def ranges(source: Source) -> Iterator[tuple[int, Tensor]]:
    """All elements, as many as are decoded at a time: where each range begins, and its values."""
    for begin, end in _cut(0, source.numel, _RANGE):
        yield begin, source.read(begin, end)


def _cut(begin: int, end: int, step: int) -> Iterator[tuple[int, int]]:
    """[begin, end), cut at multiples of step."""
    while begin < end:
        stop = min((begin // step + 1) * step, end)
        yield begin, stop
        begin = stop


def same_values(a: Tensor, b: Tensor) -> bool:
    """NaN equals NaN, and zeros of any sign each other."""
    a, b = a.to(torch.float32), b.to(torch.float32)
    return torch.equal(a, b) or torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True)
