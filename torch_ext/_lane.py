"""One thread that runs tasks in the order in which they were given.

A wait for the network blocks, so it needs a thread beside the one that runs backward; waits release the GIL.
"""

import queue
import threading
import weakref
from collections.abc import Callable

_Task = Callable[[], None]


def _run(tasks: "queue.SimpleQueue[_Task | None]") -> None:
    while (task := tasks.get()) is not None:
        task()
        del task  # or the last task's tensors would live until the next one comes


class Lane:
    """A lazily started daemon thread; it ends when the lane is dropped. Tasks must not raise.

    A daemon, because a thread that waits for a peer that never answers must not keep the interpreter from exiting: the
    exit is what tells the other ranks.
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
        self._tasks.put(task)
