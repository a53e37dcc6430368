"""Devices for the tests of `offload_fraction`: the host in a device's place, with copies that are late."""

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from torch_ext.optim.cpu_offload import copies, host_states, staged_args
from torch_ext.optim.cpu_offload.copies import CopyStream, CopyStreams

NUMEL = 4096  # elements of a batch here: small tests have many batches, and parameters that are cut


class LateLane(CopyStream):
    """Copies are made when somebody waits for them, and until then what they write is rubbish."""

    def __init__(self) -> None:
        self.asked: list[Callable[[], Any]] = []
        self.done = 0
        self.lock = threading.RLock()

    def begin(self) -> None: ...

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        for target, source in zip(targets, sources, strict=True):
            target.detach().fill_(-77)
            self.ask(lambda target=target, source=source: target.copy_(source))

    def ask(self, task: Callable[[], Any]) -> None:
        with self.lock:
            self.asked.append(task)

    def mark(self) -> int:
        return len(self.asked)

    def wait(self, mark: int) -> None:
        with self.lock:
            while self.done < mark:
                at, self.done = self.done, self.done + 1
                self.asked[at]()

    def end(self) -> None:
        self.wait(self.mark())


class LateLanes:
    """What the library is told of two of them."""

    def __init__(self, down: LateLane, up: LateLane) -> None:
        self.ways = (down, up)
        self.marks: dict[tuple[int, int], int] = {}  # by way and slot
        self.follows = threading.local()  # whether what the thread copies down comes after something
        functions = (
            staged_args.COPY(self.copy),
            staged_args.MARK(self.mark),
            staged_args.MARK(self.wait),
            staged_args.FOLLOW(self.follow),
        )
        self.native = staged_args.CopyOps(ctypes.sizeof(staged_args.CopyOps), None, *functions)

    def copy(self, _ctx: Any, up: int, to: int, source: int, nbytes: int, _error: Any) -> int:
        if not (up == 0 and getattr(self.follows, "now", False)):  # else somebody may read it still
            ctypes.memset(to, 0xB3, nbytes)
        self.ways[up].ask(lambda: ctypes.memmove(to, source, nbytes))
        return 0

    def mark(self, _ctx: Any, up: int, slot: int, _error: Any) -> int:
        self.follows.now = False
        self.marks[up, slot] = self.ways[up].mark()
        return 0

    def wait(self, _ctx: Any, up: int, slot: int, _error: Any) -> int:
        self.ways[up].wait(self.marks.get((up, slot), 0))
        return 0

    def follow(self, _ctx: Any, slot: int, _error: Any) -> int:
        self.follows.now = True
        mark = self.marks.get((1, slot), 0)
        self.ways[0].ask(lambda: self.ways[1].wait(mark))
        return 0


@contextmanager
def lanes(kind: str) -> Iterator[list[int]]:
    """Optimizers that take their first step here have these lanes: "prompt", "late". Yields the sizes of the buffers
    that are made."""
    made: list[int] = []
    before = host_states.lanes_of

    class Counted(CopyStreams):
        def buffer(self, numel: int) -> Tensor:
            made.append(numel)
            return torch.empty(numel, dtype=torch.uint8)

    def lanes_of(device: torch.device) -> CopyStreams:
        own = copies.lanes_of(device)._replace(numel=NUMEL)
        if kind == "late":
            down, up = LateLane(), LateLane()
            late = LateLanes(down, up)

            def native(_slots: int) -> int:
                return ctypes.addressof(late.native)

            own = own._replace(down=down, up=up, slots=2, shared=False, native=native)
        return Counted(*own)

    host_states.lanes_of = lanes_of
    try:
        yield made
    finally:
        host_states.lanes_of = before
