"""Runs a function as the ranks of a gloo process group, each rank a process of its own, under a hard time limit.

Processes come from a fork server that has imported torch once, so a test costs a fraction of a second.
"""

import datetime
import gc
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

# Before the fork server starts: ranks share two cores, and the host's name need not resolve.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

_ROOT = pathlib.Path(__file__).absolute().parents[2]
_FRAMEWORKS = "torch_ext.integrations"
"""Imports other packages, which takes seconds, so it is not preloaded."""


def _own_modules() -> list[str]:
    """Returns the package's modules. They are imported lazily; preloaded, no rank of any test imports them again."""
    paths = (path.relative_to(_ROOT).with_suffix("") for path in (_ROOT / "torch_ext").rglob("*.py"))
    names = (".".join(path.parts).removesuffix(".__init__") for path in paths if path.name != "__main__")
    return sorted(name for name in names if not name.startswith(_FRAMEWORKS))


_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["pytest", "torch.distributed", "torch._dynamo", *_own_modules()])


@dataclass(frozen=True)
class Raised:
    """The answer of a rank whose function raised."""

    kind: str
    message: str
    trace: str


@dataclass(frozen=True)
class Died:
    """The answer of a rank whose process ended without one."""

    exit_code: int | None


_TIMEOUT = datetime.timedelta()  # of the process groups in this rank's process


def group_with_collectives() -> Any:
    """Returns a group of all ranks whose back end is gloo under another name. Our exchanges have no point-to-point
    messages for an unknown back end, and use collectives."""
    import torch.distributed as dist

    if not hasattr(dist.Backend, "ANOTHER"):

        def another(store: Any, rank: int, size: int, timeout: datetime.timedelta) -> Any:
            return dist.ProcessGroupGloo(store, rank, size, timeout)

        dist.Backend.register_backend("another", another, devices=["cpu"])
    group = dist.new_group(backend="another", timeout=_TIMEOUT)
    dist.barrier()  # else a rank that has nothing more to do could end before the others are connected
    return group


def _rank(
    body: Callable[..., Any], rank: int, world_size: int, store: str, seconds: float, answer: Any, args: Any
) -> None:
    """The body of a rank's process: joins the group, calls `body` and sends its answer."""
    import torch.distributed as dist

    global _TIMEOUT
    _TIMEOUT = datetime.timedelta(seconds=seconds)
    gc.freeze()  # keeps what the fork server imported in shared pages
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=_TIMEOUT,
    )
    try:
        answer.send(body(rank, world_size, *args))
    except Exception as error:
        answer.send(Raised(type(error).__name__, str(error), traceback.format_exc()))
        answer.close()
        os._exit(0)  # like a rank that crashed: without destroying the process group
    answer.close()
    dist.destroy_process_group()


def outcomes(
    world_size: int, body: Callable[..., Any], *args: Any, limit: float = 120.0, timeout: float = 20.0
) -> list[Any]:
    """Returns, for each rank, what body(rank, world_size, *args) returned, or Raised, or Died.

    limit: seconds after which every process is killed and the test fails; far more than a busy machine needs.
    timeout: of the process group, in seconds.
    """
    with world(world_size, body, *args, timeout=timeout) as started:
        return collect(started, time.monotonic() + limit)


@contextmanager
def world(world_size: int, body: Callable[..., Any], *args: Any, timeout: float) -> Iterator[list[Any]]:
    """Starts the ranks and yields them, for `collect`; several worlds may run at a time. Kills them at the end."""
    with tempfile.TemporaryDirectory() as folder:
        store = str(pathlib.Path(folder) / "store")
        started = []
        for rank in range(world_size):
            mine, theirs = _context.Pipe(duplex=False)
            process = _context.Process(target=_rank, args=(body, rank, world_size, store, timeout, theirs, args))
            process.start()
            theirs.close()
            started.append((process, mine))
        try:
            yield started
        finally:
            for process, mine in started:
                process.kill()
                process.join()
                mine.close()


def collect(started: list[Any], deadline: float) -> list[Any]:
    """Waits for the ranks of a `world` and returns what `outcomes` returns."""
    answers: dict[int, Any] = {}
    pipes = {mine: rank for rank, (_, mine) in enumerate(started)}
    while pipes:
        ready = multiprocessing.connection.wait(list(pipes), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise AssertionError(f"time limit: ranks {sorted(pipes.values())} gave no answer; the others: {answers}")
        for pipe in ready:
            rank = pipes.pop(pipe)
            try:
                answers[rank] = pipe.recv()
            except EOFError:
                process = started[rank][0]
                process.join(max(0.0, deadline - time.monotonic()))
                answers[rank] = Died(process.exitcode)
    for process, _ in started:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.exitcode is None:
            raise AssertionError("time limit: a rank answered but does not end")
    for rank, (process, _) in enumerate(started):
        if process.exitcode != 0 and not isinstance(answers[rank], Died):
            raise AssertionError(f"rank {rank} answered and then ended with exit status {process.exitcode}")
    return [answers[rank] for rank in range(len(started))]


def run(
    world_size: int, body: Callable[..., Any], *args: Any, limit: float = 120.0, timeout: float = 20.0
) -> list[Any]:
    """Returns what `outcomes` returns; an assertion fails if a rank raised or died."""
    answers = outcomes(world_size, body, *args, limit=limit, timeout=timeout)
    for rank, answer in enumerate(answers):
        if isinstance(answer, Raised):
            raise AssertionError(f"rank {rank} raised:\n{answer.trace}")
        if isinstance(answer, Died):
            raise AssertionError(f"rank {rank} died with exit status {answer.exit_code}")
    return answers
