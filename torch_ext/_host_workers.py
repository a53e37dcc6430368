"""Several threads that step batches, each with slots of its own and the next batch whenever it is done with one.

No thread waits for another before all batches are done: on a busy machine one of them is late by a batch, where threads
that share each batch would wait for the slowest of them every time.
"""

import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from torch_ext._staging import Lanes


class Stepper(Protocol):
    """What is done to batch k in a slot."""

    def bring(self, k: int, slot: int, free: Any) -> Any:
        """Starts to bring it there; returns the mark. free: the mark of what left the slot before, or None."""

    def operate(self, k: int, slot: int) -> bool:
        """Steps it; returns whether the step is skipped, where nothing was written."""

    def send(self, k: int, slot: int) -> Any:
        """Starts to send the weights back; returns the mark."""


class Workers:
    def __init__(self, stepper: Stepper, lanes: Lanes) -> None:
        self._stepper, self._lanes = stepper, lanes
        self._free: dict[int, Any] = {}  # by slot: the mark of the weights that left it last
        self.skipped = False

    def begin(self) -> None:
        """A step begins."""
        self._free.clear()
        self.skipped = False

    def run(self, batches: Sequence[int]) -> None:
        """Steps them all, unless the step is skipped. What a thread raises is raised here when all of them ended."""
        turn = itertools.count()
        failures: list[BaseException] = []

        def work(worker: int) -> None:
            try:
                with torch.no_grad():
                    self._work(worker, batches, turn, failures)
            except BaseException as failure:
                failures.append(failure)

        self._beside(work, min(self._lanes.workers, len(batches)) - 1)
        if failures:
            raise failures[0]

    @staticmethod
    def _beside(work: Callable[[int], None], others: int) -> None:
        threads = [threading.Thread(target=work, args=(1 + i,), daemon=True) for i in range(others)]
        for thread in threads:
            thread.start()
        work(0)
        for thread in threads:
            thread.join()

    def _work(
        self, worker: int, batches: Sequence[int], turn: "itertools.count[int]", failures: Sequence[object]
    ) -> None:
        down, up = self._lanes.down, self._lanes.up
        coming: deque[tuple[int, int, Any]] = deque()

        def bring(slot: int) -> None:
            if (i := next(turn)) < len(batches):
                coming.append((batches[i], slot, self._stepper.bring(batches[i], slot, self._free.get(slot))))

        slots = min(self._lanes.slots, -(-len(batches) // self._lanes.workers))  # the first must not take them all
        for slot in range(slots):
            bring(worker * self._lanes.slots + slot)
        while coming and not self.skipped and not failures:
            k, slot, mark = coming.popleft()
            down.wait(mark)
            if slot in self._free:
                up.wait(self._free[slot])
            if self._stepper.operate(k, slot):
                self.skipped = True
                return
            self._free[slot] = self._stepper.send(k, slot)
            bring(slot)
