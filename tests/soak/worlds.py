"""Processes that fork from this one, which imported torch once and never ran a thread: worlds of ranks, several of them
at a time, that are struck by signals while they work."""

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

import torch_ext

_PRELOADED = ["torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor"]

_SETUP = 60.0
"""Seconds within which a busy machine connects a world: far beyond what it needs."""


def preload() -> None:
    """Imports here, once, what processes would import each."""
    for name in _PRELOADED:
        importlib.import_module(name)
    for name in ("CheckpointReader", "CheckpointWriter"):
        getattr(torch_ext, name)
    torch.set_num_threads(1)
    assert threading.active_count() == 1, "of processes with threads forks inherit locks that nobody opens"


@dataclass
class Raised:
    """A rank's function raised."""

    message: str
    trace: str


@dataclass
class Died:
    """A process ended without an answer: killed by the signal -status, or with that status."""

    status: int


class Line:
    """What a forked process has of this one, and another process that strikes it: no load of ours delays that."""

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
        self._pipe.send(("told", told))

    def strike(self, *orders: tuple[float, signal.Signals]) -> None:
        """Signals for this process, one after the other, each so many seconds after the one before."""
        os.write(self._orders, b"".join(_ORDER.pack(*order) for order in orders))


_ORDER = struct.Struct("di")


def _strike(orders: int, victim: int) -> None:
    """The whole life of the other process, which ends with the first one."""
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
    """One forked process: what it tells while it works, and its answer."""

    def __init__(self, number: int, body: "Callable[[Line], Any]", log: pathlib.Path) -> None:
        """body returns the answer."""
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
        """What there is to read: blocks where there is nothing."""
        try:
            kind, value = self.pipe.recv()
        except (EOFError, OSError):
            kind, value = "answer", Died(self._status())
        if kind == "told":
            self.told.append(value)
            return
        self.answer = (value,)

    def _status(self) -> int:
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        return os.waitstatus_to_exitcode(status)

    def end(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            self._status()
        self.pipe.close()


def _run(body: Callable[[Line], Any], pipe: Any, log: pathlib.Path) -> None:
    """The whole life of a forked process: it never returns."""
    status = 1
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(descriptor, 2)
        faulthandler.register(signal.SIGUSR1, file=descriptor, all_threads=True)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        atexit._clear()  # the driver's; what this process imports or starts registers its own
        atexit.register(os.close, descriptor)
        try:
            value: Any = body(Line(pipe))
        except Exception as error:
            value = Raised(str(error), traceback.format_exc())
        pipe.send(("answer", value))
        status = 0
    except BaseException:  # as Python ends after it; the pipe's end says it
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
    """Ranks that are one process group, and what is going to happen to them."""

    ranks: list[Rank]
    log: pathlib.Path
    deadline: float
    on_told: Callable[["World", Rank], object] = lambda world, rank: None
    on_end: Callable[[], object] = lambda: None
    """Called when the first rank has ended."""

    def bound(self, seconds: float) -> None:
        """The world is hung if it has not ended so many seconds from now."""
        self.deadline = time.monotonic() + seconds

    @property
    def done(self) -> bool:
        return all(rank.done for rank in self.ranks)

    @property
    def answers(self) -> list[Any]:
        """None of a rank that is hung."""
        return [None if rank.answer is None else rank.answer[0] for rank in self.ranks]

    def kill(self) -> None:
        for rank in self.ranks:
            if not rank.done:
                os.kill(rank.pid, signal.SIGKILL)

    def stacks(self) -> str:
        """Of the ranks that did not end, and what all of them said on stderr."""
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
    """The ranks run body(rank, size, group, line, *args). timeout: in seconds, of the group, which has all of them;
    0: there is none. store: "file", or "tcp", of which rank 0's process is the server, as it is without torchrun."""
    log = folder / "stderr"
    log.touch()

    def of(rank: int) -> Callable[[Line], Any]:
        def run(line: Line) -> Any:
            gc.freeze()  # what was imported stays shared memory
            given = _connect(rank, size, folder, timeout, store) if timeout else None
            return body(rank, size, given, line, *args)

        return run

    return World([Rank(rank, of(rank), log) for rank in range(size)], log, time.monotonic() + _SETUP)


def _connect(rank: int, size: int, folder: pathlib.Path, timeout: float, store: str) -> Any:
    made: Any = dist.FileStore(str(folder / "store"), size) if store == "file" else _tcp_store(rank, size, folder)
    long = datetime.timedelta(seconds=_SETUP)
    dist.init_process_group("gloo", store=made, rank=rank, world_size=size, timeout=long)
    group = dist.new_group(timeout=datetime.timedelta(seconds=timeout))
    dist.barrier()
    return group


def _tcp_store(rank: int, size: int, folder: pathlib.Path) -> Any:
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
    """A folder in memory, where there is one."""
    with tempfile.TemporaryDirectory(prefix="torch_ext_soak.") as folder:
        yield pathlib.Path(folder)


def wait(worlds: Sequence[World]) -> None:
    """Until something was told, or has ended, or is late, in any of the worlds."""
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
    """What body(0, 1, None, line, *args) returned in a process of its own."""
    world = start(1, body, args, folder)
    with contextlib.closing(world):
        while not world.done:
            wait([world])
    (answer,) = world.answers
    return f"{answer.trace}" if isinstance(answer, Raised) else answer
