"""Saving beside the training: `AsyncSaver`."""

import contextlib
import os
import threading
from types import TracebackType
from typing import Any

from torch_ext.checkpoint import files
from torch_ext.checkpoint.snapshot import Buffers

_NICE = 19  # of the thread that writes: the least that the system gives


class AsyncSaver:
    """`torch_ext.save` by a thread of its own, which leaves the processors to the training.

        with torch_ext.AsyncSaver(states="at_rest") as saver:
            for step, batch in enumerate(batches):
                ...
                if step % 1000 == 0:
                    saver.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "checkpoint.pt")

    The state is copied into host memory, which is allocated by the first save and used again: what it takes at rest,
    once. Training goes on when it is copied. A file is whole or the former one, whenever the process is killed. Signal
    handlers and other threads may save while a save is under way: they have memory of their own then.

    states, compress: as of `torch_ext.save`.
    """

    def __init__(self, *, states: str = "logical", compress: bool = True) -> None:
        files.refuse_form(states)
        self._states, self._compress = states, compress
        self._free: list[Buffers] = []
        self._running: list[tuple[threading.Thread, Buffers]] = []  # what is written from, and by whom
        self._failed: tuple[str, BaseException] | None = None
        self._closed = False

    @property
    def nbytes(self) -> int:
        """Of the host memory that it keeps."""
        return sum(buffers.nbytes for buffers in (*self._free, *(buffers for _, buffers in self._running)))

    def save(self, obj: Any, path: str | os.PathLike[str]) -> None:
        """Saves `obj` to the file `path`. Comes back when it is copied; waits for the save before to end.

        Raises what `wait` raises, and then nothing was begun. RuntimeError after `close`.
        """
        if self._closed:
            raise RuntimeError("AsyncSaver.save() after close(): make another one")
        self.wait()
        path = os.path.abspath(path)  # the thread may find another working directory
        try:
            buffers = self._free.pop()  # nobody else's until it is written
        except IndexError:
            buffers = Buffers()
        copied = buffers.take(obj)
        # no daemon: a program that ends waits for its last checkpoint
        thread = threading.Thread(target=self._write, args=(copied, path), name=f"torch_ext saves {path}")
        thread.start()
        self._running.append((thread, buffers))

    def _write(self, copied: Any, path: str) -> None:
        try:
            yield_to_others()
            files.save(copied, path, states=self._states, compress=self._compress)
        except BaseException as error:
            self._failed = path, error

    def wait(self) -> None:
        """Until the save is on the disk. RuntimeError, naming the file and caused by what was raised, where it failed;
        the former file is there then."""
        for entry in list(self._running):
            entry[0].join()
            with contextlib.suppress(ValueError):  # another thread waited for it, too, and was quicker
                self._running.remove(entry)
                self._free = [entry[1]]
        if self._failed is not None:
            (path, error), self._failed = self._failed, None
            raise RuntimeError(f"saving {path} failed: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """`wait`, and gives the memory back. May be called again."""
        self._closed = True
        try:
            self.wait()
        finally:
            self._free = []

    def __enter__(self) -> "AsyncSaver":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def yield_to_others() -> None:
    """The calling thread, and those that it starts, run when others do not need the processor."""
    with contextlib.suppress(OSError, AttributeError):  # threads have priorities of their own on Linux
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
