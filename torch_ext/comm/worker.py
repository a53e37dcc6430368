"""Worker threads that run tasks in order. A task that waits for the network releases the GIL, so backward continues."""

import atexit
import functools
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import NamedTuple

_Task = Callable[[], None]

# Seconds that the exit of the interpreter waits for running tasks. These end at once unless another rank is late.
_GRACE = 5.0


class _Ending(NamedTuple):
    """The functions that end a thread."""

    tell: Callable[[], None] | None = None  # tells the thread to end after all queued tasks
    give_up: Callable[[], None] | None = None  # makes waits in its tasks end with errors


# Every started thread that has not ended. This includes threads whose WorkerThread was deleted: such a thread still has
# to release the memory of its last task.
_threads: "weakref.WeakKeyDictionary[threading.Thread, _Ending]" = weakref.WeakKeyDictionary()


def _run(tasks: "queue.SimpleQueue[_Task | None]") -> None:
    while (task := tasks.get()) is not None:
        task()
        del task  # otherwise the task's tensors would live until the next task


class WorkerThread:
    """A daemon thread, started with the first task and ended with this object. Tasks must not raise.

    It is a daemon because a thread that waits for a dead rank must not keep the interpreter from exiting: other ranks
    learn of the failure by the exit. But the exit waits for the thread for a while, and then makes it give up. A thread
    that returns from C++ while the interpreter is being finalized is unwound by force, which aborts the process.
    """

    def __init__(self, name: str, give_up: Callable[[], None]) -> None:
        """give_up: makes waits in tasks end with errors; called at exit. Must reference neither this object nor a
        process group: the thread frees `give_up` as it ends, and freeing a group during finalization aborts the
        process."""
        self._name, self._give_up = name, give_up
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, task: _Task) -> None:
        """Queues the task after all tasks submitted before."""
        if self._thread is None:
            self._thread = threading.Thread(target=_run, args=(self._tasks,), name=self._name, daemon=True)
            tell = functools.partial(self._tasks.put, None)
            self._thread.start()
            weakref.finalize(self, tell)
            _threads[self._thread] = _Ending(tell, self._give_up)
        self._tasks.put(task)


def ask(question: _Task) -> threading.Thread:
    """Runs a question to a store, which may never answer, on a new thread and returns the thread. It is a daemon for
    which the exit waits for a while, as for workers."""
    thread = threading.Thread(target=question, name="torch_ext inquiry", daemon=True)
    thread.start()
    _threads[thread] = _Ending()
    return thread


@atexit.register
def _end_all() -> None:
    """Ends all threads at exit: waits for their tasks, then makes threads that are still running give up."""
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
