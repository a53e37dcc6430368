"""Stand-ins for devices, for tests of `offload_fraction`: the host in place of a device, with copies that are late."""

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from torch_ext.optim.cpu_offload import copies, host_states, staged_args

NUMEL = 4096  # elements per batch: small, so that tests have many batches, and parameters that are split


class LateStream:
    """A stream that runs its tasks, in order, only when a caller waits for them."""

    def __init__(self) -> None:
        self.asked: list[Callable[[], Any]] = []
        self.done = 0
        self.lock = threading.RLock()

    def ask(self, task: Callable[[], Any]) -> None:
        with self.lock:
            self.asked.append(task)

    def wait(self, mark: int) -> None:
        with self.lock:
            while self.done < mark:
                at, self.done = self.done, self.done + 1
                self.asked[at]()


class LateCopies(copies.HostCopies):
    """Copies that are made when a caller waits for them. Until then their target has garbage."""

    shared = False
    slots = 2
    numel = NUMEL

    def __init__(self) -> None:
        self.down, self.up = LateStream(), LateStream()
        self.ops = LateOps(self.down, self.up)

    def buffer(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def to_host(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        self.copy(self.down, targets, sources)

    def copy(self, stream: LateStream, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        for target, source in zip(targets, sources, strict=True):
            target.detach().fill_(-77)
            stream.ask(lambda target=target, source=source: target.copy_(source))

    def mark(self) -> int:
        return len(self.down.asked)

    def wait(self, mark: int) -> None:
        self.down.wait(mark)

    def end(self) -> None:
        self.up.wait(len(self.up.asked))

    def finish(self) -> None:
        for stream in (self.down, self.up):
            stream.wait(len(stream.asked))

    def native(self, slots: int) -> int:
        return ctypes.addressof(self.ops.native)


class LateOps:
    """The copy operations that the C library calls, on two late streams."""

    def __init__(self, down: LateStream, up: LateStream) -> None:
        self.ways = (down, up)
        self.marks: dict[tuple[int, int], int] = {}  # by direction (0: down, 1: up) and slot
        self.follows = threading.local()  # whether the thread's next copies down follow a copy up
        functions = (
            staged_args.COPY(self.copy),
            staged_args.MARK(self.mark),
            staged_args.MARK(self.wait),
            staged_args.FOLLOW(self.follow),
        )
        self.native = staged_args.CopyOps(ctypes.sizeof(staged_args.CopyOps), None, *functions)

    def copy(self, _ctx: Any, up: int, to: int, source: int, nbytes: int, _error: Any) -> int:
        if not (up == 0 and getattr(self.follows, "now", False)):  # else the target may still be read
            ctypes.memset(to, 0xB3, nbytes)
        self.ways[up].ask(lambda: ctypes.memmove(to, source, nbytes))
        return 0

    def mark(self, _ctx: Any, up: int, slot: int, _error: Any) -> int:
        self.follows.now = False
        self.marks[up, slot] = len(self.ways[up].asked)
        return 0

    def wait(self, _ctx: Any, up: int, slot: int, _error: Any) -> int:
        self.ways[up].wait(self.marks.get((up, slot), 0))
        return 0

    def follow(self, _ctx: Any, slot: int, _error: Any) -> int:
        self.follows.now = True
        mark = self.marks.get((1, slot), 0)
        self.ways[0].ask(lambda: self.ways[1].wait(mark))
        return 0


class PromptCopies(copies.HostCopies):
    numel = NUMEL


@contextmanager
def copying(kind: str) -> Iterator[list[int]]:
    """Within this context, optimizers that take their first step use copies of this kind: "prompt" or "late". Yields a
    list of the sizes of the buffers that they allocate."""
    made: list[int] = []
    before = host_states.copies_of

    def copies_of(device: torch.device) -> copies.HostCopies:
        assert device.type == "cpu"
        found = LateCopies() if kind == "late" else PromptCopies()
        buffer = found.buffer

        def counted(nbytes: int) -> Tensor:
            made.append(nbytes)
            return buffer(nbytes)

        found.buffer = counted  # type: ignore[method-assign]
        return found

    host_states.copies_of = copies_of
    try:
        yield made
    finally:
        host_states.copies_of = before
