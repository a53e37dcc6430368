"""Worlds of ranks, several at a time, whose processes get signals while they work. They are forked from this process,
which has imported torch once and never started a thread."""

import atexit
import contextlib
import datetime
import faulthandler
import gc
import importlib
import multiprocessing.connection
import os
import pathlib
import signal
import struct
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from soak.torch_modules import TORCH_MODULES

import torch_ext

_SETUP = 60.0
"""Seconds within which a world must connect; far more than a busy machine needs."""


def preload() -> None:
    """Imports what every process would otherwise import for itself."""
    for name in TORCH_MODULES:
        importlib.import_module(name)
    for name in ("CheckpointReader", "CheckpointWriter"):
        getattr(torch_ext, name)
    torch.set_num_threads(1)
    assert threading.active_count() == 1, "of processes with threads forks inherit locks that nobody opens"


@dataclass
class Raised:
    """The answer of a rank whose function raised."""

    message: str
    trace: str


@dataclass
class Died:
    """The answer of a process that ended without one. status: its exit status, or minus the signal that killed it."""

    status: int


class Line:
    """A forked process's connection to the driver, and to a helper process that sends it signals.

    The signals come from a process of their own so that our load does not delay them."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe
        self._orders, theirs = -1, -1
        victim = os.pidfd_open(os.getpid())
        theirs, self._orders = os.pipe()
        if os.fork() == 0:
            _strike(theirs, victim)
        os.close(theirs)
        os.close(victim)

    def tell(self, told: Any) -> None:
        """Sends `told` to the driver, whose World.on_told is called."""
        self._pipe.send(("told", told))

    def strike(self, *orders: tuple[float, signal.Signals]) -> None:
        """Requests signals for this process, in this order. An order: seconds after the previous signal, signal."""
        os.write(self._orders, b"".join(_ORDER.pack(*order) for order in orders))


_ORDER = struct.Struct("di")


def _strike(orders: int, victim: int) -> None:
    """The body of the helper process: sends the requested signals to `victim`, and ends when the victim does."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for descriptor in range(3, max(orders, victim) + 64):
            if descriptor not in (orders, victim):
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        while order := os.read(orders, _ORDER.size):
            seconds, which = _ORDER.unpack(order)
            time.sleep(seconds)
            signal.pidfd_send_signal(victim, which)
    finally:
        os._exit(0)


class Rank:
    """One forked process, as the driver sees it: what it has told, and its answer."""

    def __init__(self, number: int, body: "Callable[[Line], Any]", log: pathlib.Path) -> None:
        """body: runs in the process and returns the answer."""
        self.number = number
        self.answer: tuple[Any] | None = None
        self.told: list[Any] = []
        self.pipe, theirs = multiprocessing.connection.Pipe(duplex=False)
        self.pid = os.fork()
        if self.pid == 0:
            _run(body, theirs, log)
        theirs.close()

    @property
    def done(self) -> bool:
        return self.answer is not None

    def read(self) -> None:
        """Reads one message; blocks until there is one."""
        try:
            kind, value = self.pipe.recv()
        except (EOFError, OSError):
            kind, value = "answer", Died(self._status())
        if kind == "told":
            self.told.append(value)
            return
        self.answer = (value,)

    def _status(self) -> int:
        """Waits for the process and returns its exit status, or minus the signal that killed it."""
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        return os.waitstatus_to_exitcode(status)

    def end(self) -> None:
        """Kills the process if it is still there."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            self._status()
        self.pipe.close()


def _run(body: Callable[[Line], Any], pipe: Any, log: pathlib.Path) -> None:
    """The whole life of a forked process: calls `body`, sends the answer and exits; never returns."""
    status = 1
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(descriptor, 2)
        faulthandler.register(signal.SIGUSR1, file=descriptor, all_threads=True)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        atexit._clear()  # drops the driver's handlers; what this process imports or starts registers its own
        atexit.register(os.close, descriptor)
        try:
            value: Any = body(Line(pipe))
        except Exception as error:
            value = Raised(str(error), traceback.format_exc())
        pipe.send(("answer", value))
        status = 0
    except BaseException:  # ends the process as Python would; the driver sees that the pipe is closed
        with contextlib.suppress(BaseException):
            traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            pipe.close()
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
        os._exit(status)


@dataclass
class World:
    """Ranks that are one process group, as the driver sees them."""

    ranks: list[Rank]
    log: pathlib.Path
    deadline: float
    on_told: Callable[["World", Rank], object] = lambda world, rank: None
    on_end: Callable[[], object] = lambda: None
    """Called when the first rank ends."""

    def bound(self, seconds: float) -> None:
        """Sets the time limit: the world is hung if it has not ended `seconds` from now."""
        self.deadline = time.monotonic() + seconds

    @property
    def done(self) -> bool:
        return all(rank.done for rank in self.ranks)

    @property
    def answers(self) -> list[Any]:
        """Each rank's answer; None: it gave none yet."""
        return [None if rank.answer is None else rank.answer[0] for rank in self.ranks]

    def kill(self) -> None:
        for rank in self.ranks:
            if not rank.done:
                os.kill(rank.pid, signal.SIGKILL)

    def stacks(self) -> str:
        """Returns the Python stacks of the ranks that did not end, and everything that all ranks wrote to stderr."""
        for rank in self.ranks:
            if not rank.done:
                os.kill(rank.pid, signal.SIGCONT)
                os.kill(rank.pid, signal.SIGUSR1)
        time.sleep(0.5)
        return self.log.read_text(errors="replace")

    def close(self) -> None:
        for rank in self.ranks:
            rank.end()


def start(
    size: int,
    body: Callable[..., Any],
    args: Sequence[Any],
    folder: pathlib.Path,
    *,
    timeout: float = 0.0,
    store: str = "file",
) -> World:
    """Starts ranks that run body(rank, size, group, line, *args).

    timeout: of the group of all ranks, in seconds; 0: there is no group. store: "file", or "tcp", whose server is rank
    0's process, as it is without torchrun."""
    log = folder / "stderr"
    log.touch()

    def of(rank: int) -> Callable[[Line], Any]:
        def run(line: Line) -> Any:
            gc.freeze()  # keeps what was imported in shared pages
            given = _connect(rank, size, folder, timeout, store) if timeout else None
            return body(rank, size, given, line, *args)

        return run

    return World([Rank(rank, of(rank), log) for rank in range(size)], log, time.monotonic() + _SETUP)


def _connect(rank: int, size: int, folder: pathlib.Path, timeout: float, store: str) -> Any:
    """Joins the world, with a long time-out, and returns a group of all ranks with the given one."""
    made: Any = dist.FileStore(str(folder / "store"), size) if store == "file" else _tcp_store(rank, size, folder)
    long = datetime.timedelta(seconds=_SETUP)
    dist.init_process_group("gloo", store=made, rank=rank, world_size=size, timeout=long)
    group = dist.new_group(timeout=datetime.timedelta(seconds=timeout))
    dist.barrier()
    return group


def _tcp_store(rank: int, size: int, folder: pathlib.Path) -> Any:
    """Returns the store of rank 0's process; rank 0 writes its port to a file."""
    place = folder / "port"
    long = datetime.timedelta(seconds=_SETUP)
    if rank == 0:
        made = dist.TCPStore("127.0.0.1", 0, size, True, long, wait_for_workers=False)
        (folder / "port.new").write_text(str(made.port))
        (folder / "port.new").rename(place)
        return made
    while not place.exists():
        time.sleep(0.005)
    return dist.TCPStore("127.0.0.1", int(place.read_text()), size, False, long)


@contextlib.contextmanager
def scratch() -> Iterator[pathlib.Path]:
    """Yields a temporary folder, deleted at the end."""
    with tempfile.TemporaryDirectory(prefix="torch_ext_soak.") as folder:
        yield pathlib.Path(folder)


def wait(worlds: Sequence[World]) -> None:
    """Waits until a rank tells something or ends, or a world is past its time limit. Calls on_told and on_end."""
    pipes = {rank.pipe: (world, rank) for world in worlds for rank in world.ranks if not rank.done}
    seconds = max(0.0, min(world.deadline for world in worlds) - time.monotonic())
    for ready in multiprocessing.connection.wait(list(pipes), seconds):
        world, rank = pipes[ready]  # type: ignore[index]
        rank.read()
        if not rank.done:
            world.on_told(world, rank)
        elif sum(each.done for each in world.ranks) == 1:
            world.on_end()


def call(body: Callable[..., Any], args: Sequence[Any], folder: pathlib.Path) -> Any:
    """Returns what body(0, 1, None, line, *args) returns in a process of its own; if it raises, the traceback."""
    world = start(1, body, args, folder)
    with contextlib.closing(world):
        while not world.done:
            wait([world])
    (answer,) = world.answers
    return f"{answer.trace}" if isinstance(answer, Raised) else answer
