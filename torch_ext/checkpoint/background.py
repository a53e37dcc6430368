"""`AsyncSaver`, which saves while training goes on."""

import contextlib
import os
import threading
from types import TracebackType
from typing import Any

from torch_ext.checkpoint import files
from torch_ext.checkpoint.snapshot import Buffers

_NICE = 19  # the writing thread's nice value: the lowest priority on Linux


class AsyncSaver:
    """Runs `torch_ext.save` in a thread of lowest priority while training goes on.

        with torch_ext.AsyncSaver(states="at_rest") as saver:
            for step, batch in enumerate(batches):
                ...
                if step % 1000 == 0:
                    saver.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "checkpoint.pt")

    `save` returns once the state is copied into host memory. The first save allocates that memory, as much as the state
    takes in its stored form, and later saves use it again. If the process is killed, the file is either the previous
    one or the complete new one. Signal handlers and other threads may call `save` during a save; they get memory of
    their own.

    states, compress: as for `torch_ext.save`.
    """

    def __init__(self, *, states: str = "logical", compress: bool = True) -> None:
        files.refuse_form(states)
        self._states, self._compress = states, compress
        self._free: list[Buffers] = []
        self._running: list[tuple[threading.Thread, Buffers]] = []  # each writing thread, and the copy that it writes
        self._failed: tuple[str, BaseException] | None = None
        self._closed = False

    @property
    def nbytes(self) -> int:
        """Size of the host memory that this object keeps."""
        return sum(buffers.nbytes for buffers in (*self._free, *(buffers for _, buffers in self._running)))

    def save(self, obj: Any, path: str | os.PathLike[str]) -> None:
        """Saves `obj` to the file `path`. Waits for the previous save to end; returns once `obj` is copied.

        Raises the errors of `wait`, in which case no new save was started. Raises RuntimeError after `close`.
        """
        if self._closed:
            raise RuntimeError("AsyncSaver.save() after close(): make another one")
        self.wait()
        path = os.path.abspath(path)  # the working directory may change before the thread uses it
        try:
            buffers = self._free.pop()  # no other save may use them until this one is written
        except IndexError:
            buffers = Buffers()
        copied = buffers.take(obj)
        # not a daemon thread: at its end the program waits for the last checkpoint
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
        """Waits until the save is on the disk. Raises RuntimeError, with the file's name and the original error as its
        cause, if the save failed; the previous file is still there then."""
        for entry in list(self._running):
            entry[0].join()
            with contextlib.suppress(ValueError):  # another thread that also waited has removed it already
                self._running.remove(entry)
                self._free = [entry[1]]
        if self._failed is not None:
            (path, error), self._failed = self._failed, None
            raise RuntimeError(f"saving {path} failed: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Waits as `wait` does, then frees the memory. May be called again."""
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
    """Gives the calling thread, and threads that it starts, the lowest priority for the processor."""
    with contextlib.suppress(OSError, AttributeError):  # only on Linux does a thread have a priority of its own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
