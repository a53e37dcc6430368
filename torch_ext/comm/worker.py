"""One thread that runs tasks in the order in which they were given.

A wait for the network blocks, so it needs a thread beside the one that runs backward; waits release the GIL.
"""

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable

_Task = Callable[[], None]

# Seconds for what is under way when the interpreter exits, which ends in no time unless another rank is late.
_GRACE = 5.0

_lanes: "weakref.WeakSet[WorkerThread]" = weakref.WeakSet()


def _run(tasks: "queue.SimpleQueue[_Task | None]") -> None:
    while (task := tasks.get()) is not None:
        task()
        del task  # or the last task's tensors would live until the next one comes


class WorkerThread:
    """A lazily started daemon thread; it ends when the lane is dropped. Tasks must not raise.

    A daemon, because a thread that waits for a peer that never answers must not keep the interpreter from exiting: the
    exit is what tells the other ranks. But it is waited for a while: a thread that comes back from a wait in C++ while
    the interpreter is torn down is unwound by force, which aborts the process.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, task: _Task) -> None:
        """Queues the task behind those given before."""
        if self._thread is None:
            self._thread = threading.Thread(target=_run, args=(self._tasks,), name=self._name, daemon=True)
            self._thread.start()
            weakref.finalize(self, self._tasks.put, None)
            _lanes.add(self)
        self._tasks.put(task)

    def end(self, deadline: float) -> None:
        """Takes no task after those given before; waits for these, until the deadline (time.monotonic()) at most."""
        self._tasks.put(None)
        if self._thread is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()))


@atexit.register
def _end_all() -> None:
    deadline = time.monotonic() + _GRACE
    for lane in list(_lanes):
        lane.end(deadline)
