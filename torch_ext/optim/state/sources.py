"""Where the elements of a logical state tensor are, and how a stretch of them is read and written.

Stretches are of the elements that this rank has, in memory order; values are contiguous, of one dimension.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from torch_ext.optim.state import codec
from torch_ext.optim.state.codec import GRAIN, StateDtypes
from torch_ext.tensors import dense
from torch_ext.tensors.offload_guard import present

STRETCH = 1 << 17  # elements that are decoded or encoded at a time where there are many
assert STRETCH % GRAIN == 0

_WHAT = "an optimizer state that was handed out before"  # for messages


class PlainState:
    """They are in memory as they are."""

    lossy = False
    """Whether something was written that is not what is read now."""

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

    def settle(self) -> None:
        """What was written is there."""

    def is_in(self, at_rest: Mapping[str, Any], key: str) -> bool:
        """Whether this is that state's own."""
        own = at_rest.get(key)
        return (
            isinstance(own, Tensor)
            and own.data_ptr() == self.flat.data_ptr()
            and own.numel() == self.numel
            and own.dtype == self.dtype
        )


class EncodedState:
    """They are decoded from a state at rest when they are read, and encoded when they are written.

    Blocks are encoded as wholes: of one that was written in part the new values wait until the others came.
    """

    dtype = torch.float32

    def __init__(self, weight: Tensor, state: dict[str, Tensor], kinds: StateDtypes, key: str) -> None:
        """weight: of the elements that state is of, in the same memory order. state: at rest, as opt.state has it."""
        self.weight, self.state, self.kinds, self.key = weight, state, kinds, key
        self.lossy = False
        self._waiting: dict[int, tuple[Tensor, Tensor]] = {}  # by block: values, and which of them came

    @property
    def device(self) -> torch.device:
        return self.state["exp_avg"].device  # maybe the host, where the weight is not

    @property
    def numel(self) -> int:
        return self.weight.numel()

    def _part(self, begin: int, end: int) -> tuple[Tensor, dict[str, Tensor]]:
        present(self.state["exp_avg"], _WHAT)
        weight = dense.flat(present(self.weight, _WHAT)).view(-1)[begin:end].to(self.device)
        return weight, codec.part(self.state, self.kinds, begin, end)

    def read(self, begin: int, end: int) -> Tensor:
        """New memory."""
        first, last = begin // GRAIN * GRAIN, min(-(-end // GRAIN) * GRAIN, self.numel)
        weight, part = self._part(first, last)
        values: Tensor = codec.decode(weight, part, self.kinds, (self.key,))[self.key]
        for block, (waiting, came) in self._waiting.items():
            at = block * GRAIN - first
            if 0 <= at < last - first:
                values[at : at + came.numel()][came] = waiting[came]
        return values[begin - first : end - first]

    def write(self, begin: int, values: Tensor) -> None:
        end = begin + values.numel()
        first = -(-begin // GRAIN) * GRAIN
        last = end if end == self.numel else end // GRAIN * GRAIN
        if first >= last:
            first = last = end
        for at, stop in _stretches(begin, min(first, end), GRAIN):
            self._wait(at, values[at - begin : stop - begin])
        for at, stop in _stretches(first, last, STRETCH):
            self._encode(at, values[at - begin : stop - begin])
        for at, stop in _stretches(max(first, last), end, GRAIN):
            self._wait(at, values[at - begin : stop - begin])

    def _wait(self, begin: int, values: Tensor) -> None:
        """values: of one block, a part of it."""
        block, at = divmod(begin, GRAIN)
        if block not in self._waiting:
            size = min(GRAIN, self.numel - block * GRAIN)
            new = torch.zeros(size, dtype=self.dtype, device=self.device)
            self._waiting[block] = new, torch.zeros(size, dtype=torch.bool, device=self.device)
        waiting, came = self._waiting[block]
        waiting[at : at + values.numel()] = values
        came[at : at + values.numel()] = True
        if bool(came.all()):
            self._encode(block * GRAIN, waiting)

    def _encode(self, begin: int, values: Tensor) -> None:
        """values: of whole blocks."""
        end = begin + values.numel()
        for block in [b for b in self._waiting if begin <= b * GRAIN < end]:
            del self._waiting[block]
        weight, part = self._part(begin, end)
        values = values.to(device=self.device, dtype=self.dtype)
        codec.encode(weight, {self.key: values}, self.kinds, {}, part)
        if self.key in codec.FORMATS:  # a master beside its weight is as good as exact
            self.lossy = self.lossy or not same_values(values, self.read(begin, end))

    def settle(self) -> None:
        """Encodes what waits: nothing more will be written."""
        for block in list(self._waiting):
            begin, end = block * GRAIN, min((block + 1) * GRAIN, self.numel)
            self._encode(begin, self.read(begin, end))

    def is_in(self, at_rest: Mapping[str, Any], key: str) -> bool:
        """Whether this is that state's own."""
        return key == self.key and bool(self.state) and all(at_rest.get(k) is v for k, v in self.state.items())


def stretches(numel: int) -> Iterator[tuple[int, int]]:
    """[begin, end) of what is decoded at a time."""
    return _stretches(0, numel, STRETCH)


def _stretches(begin: int, end: int, step: int) -> Iterator[tuple[int, int]]:
    """Cut at multiples of step."""
    while begin < end:
        stop = min((begin // step + 1) * step, end)
        yield begin, stop
        begin = stop


def same_values(a: Tensor, b: Tensor) -> bool:
    """NaN equals NaN, and zeros of any sign each other."""
    a, b = a.to(torch.float32), b.to(torch.float32)
    return torch.equal(a, b) or torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True)
