"""Threads that run tasks in order. A wait for the network blocks, but releases the GIL: backward goes on beside it."""

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable

_Task = Callable[[], None]

# Seconds for tasks that run when the interpreter exits, which end at once unless another rank is late.
_GRACE = 5.0

_asking: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()
_workers: "weakref.WeakSet[WorkerThread]" = weakref.WeakSet()


def _run(tasks: "queue.SimpleQueue[_Task | None]") -> None:
    while (task := tasks.get()) is not None:
        task()
        del task  # or the last task's tensors would live until the next task


class WorkerThread:
    """A daemon thread, started with the first task and ended with this object. Tasks must not raise.

    A daemon, because a thread that waits for a dead peer must not keep the interpreter from exiting, by which the other
    ranks learn of it. But the exit waits for it a while, and then has it give up: a thread that returns from C++ while
    the interpreter is torn down is unwound by force, which aborts the process.
    """

    def __init__(self, name: str, give_up: Callable[[], None]) -> None:
        """give_up: makes waits in tasks end, by errors; called at exit. Must not hold this object."""
        self._name, self._give_up = name, give_up
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, task: _Task) -> None:
        """Queues the task behind those given before."""
        if self._thread is None:
            self._thread = threading.Thread(target=_run, args=(self._tasks,), name=self._name, daemon=True)
            self._thread.start()
            weakref.finalize(self, self._tasks.put, None)
            _workers.add(self)
        self._tasks.put(task)

    def end(self, deadline: float) -> None:
        """Ends the thread behind the tasks given before; waits for it until the deadline (time.monotonic())."""
        self._tasks.put(None)
        if self._thread is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()))

    def give_up(self) -> None:
        """Where the thread did not end."""
        if self._thread is not None and self._thread.is_alive():
            self._give_up()


def ask(question: _Task) -> threading.Thread:
    """A thread that asks a store, which may never answer. A daemon for which the exit waits a while, as for workers."""
    thread = threading.Thread(target=question, name="torch_ext inquiry", daemon=True)
    thread.start()
    _asking.add(thread)
    return thread


@atexit.register
def _end_all() -> None:
    workers = list(_workers)
    deadline = time.monotonic() + _GRACE
    for worker in workers:
        worker.end(deadline)
    for thread in list(_asking):
        thread.join(max(0.0, deadline - time.monotonic()))
    for worker in workers:
        worker.give_up()
    deadline = time.monotonic() + _GRACE
    for worker in workers:
        worker.end(deadline)
