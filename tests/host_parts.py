"""Devices for the tests of `offload_fraction`: the host in a device's place, with copies that are late."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from torch_ext import _host_part, _staging
from torch_ext._staging import Lane, Lanes

NUMEL = 9000  # elements of a batch here: small tests have many batches, and parameters that are cut


class LateLane(Lane):
    """Copies are made when somebody waits for them, and until then what they write is rubbish."""

    def __init__(self) -> None:
        self.asked: list[Callable[[], Any]] = []
        self.done = 0
        self.lock = threading.RLock()
        self.own = threading.local()  # of each thread: whether what it copies follows something

    def begin(self) -> None: ...

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        with self.lock:
            for target, source in zip(targets, sources, strict=True):
                if not getattr(self.own, "follows", False):  # else somebody may read it still
                    target.detach().fill_(-77)
                self.asked.append(lambda target=target, source=source: target.copy_(source))

    def mark(self) -> Any:
        self.own.follows = False
        return self, len(self.asked)

    def follow(self, mark: Any) -> None:
        lane, upto = mark
        self.own.follows = True
        with self.lock:
            self.asked.append(lambda: lane._work(upto))

    def wait(self, mark: Any) -> None:
        lane, upto = mark
        lane._work(upto)

    def end(self) -> None:
        self._work(len(self.asked))

    def _work(self, upto: int) -> None:
        with self.lock:
            while self.done < upto:
                at, self.done = self.done, self.done + 1
                self.asked[at]()


@contextmanager
def lanes(kind: str) -> Iterator[list[int]]:
    """Optimizers that take their first step here have these lanes, and two threads: "prompt", "late". Yields the sizes
    of the buffers that are made."""
    made: list[int] = []
    before = _host_part.lanes_of

    class Counted(Lanes):
        def buffer(self, numel: int) -> Tensor:
            made.append(numel)
            return torch.empty(numel, dtype=torch.uint8)

    def lanes_of(device: torch.device) -> Lanes:
        own = _staging.lanes_of(device)._replace(workers=2, numel=NUMEL)
        if kind == "late":
            own = own._replace(down=LateLane(), up=LateLane(), slots=2, shared=False)
        return Counted(*own)

    _host_part.lanes_of = lanes_of
    try:
        yield made
    finally:
        _host_part.lanes_of = before
