"""Threads that run tasks in order. A wait for the network blocks, but releases the GIL: backward goes on beside it."""

import atexit
import functools
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import NamedTuple

_Task = Callable[[], None]

# Seconds for tasks that run when the interpreter exits, which end at once unless another rank is late.
_GRACE = 5.0


class _Ending(NamedTuple):
    """How a thread is brought to its end."""

    tell: Callable[[], None] | None = None  # that it ends behind the tasks given before
    give_up: Callable[[], None] | None = None  # makes its waits end


# Every thread that was started, until it is gone: one whose WorkerThread was deleted has still to let go of what its
# last task held.
_threads: "weakref.WeakKeyDictionary[threading.Thread, _Ending]" = weakref.WeakKeyDictionary()


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
            tell = functools.partial(self._tasks.put, None)
            self._thread.start()
            weakref.finalize(self, tell)
            _threads[self._thread] = _Ending(tell, self._give_up)
        self._tasks.put(task)


def ask(question: _Task) -> threading.Thread:
    """A thread that asks a store, which may never answer. A daemon for which the exit waits a while, as for workers."""
    thread = threading.Thread(target=question, name="torch_ext inquiry", daemon=True)
    thread.start()
    _threads[thread] = _Ending()
    return thread


@atexit.register
def _end_all() -> None:
    threads = {thread: _threads[thread] for thread in threading.enumerate() if thread in _threads}
    for ending in threads.values():
        if ending.tell is not None:
            ending.tell()
    _join(list(threads))
    stuck = {thread: ending.give_up for thread, ending in threads.items() if ending.give_up and thread.is_alive()}
    for give_up in stuck.values():
        give_up()
    _join(list(stuck))


def _join(threads: list[threading.Thread]) -> None:
    deadline = time.monotonic() + _GRACE
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
