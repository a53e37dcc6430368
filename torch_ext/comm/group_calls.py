"""Wrappers of torch.distributed's collectives and messages. No other file of this library calls these.

A call on a group that was destroyed or has failed raises, and a back end's error is translated to one that names the
lost ranks (Note [lost ranks] in `comm/lost_ranks.py`). label: names the call in messages.
"""

import datetime
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_ext.comm.lost_ranks import has_broken, is_failure, refuse, translated_error


class Call:
    """A torch.distributed.Work whose wait() raises translated errors."""

    def __init__(self, work: Any, group: Any, label: str) -> None:
        self._work, self._group, self._label = work, group, label

    def wait(self) -> None:
        with translated(self._group, self._label):
            self._work.wait()


@contextmanager
def translated(group: Any, label: str) -> Iterator[None]:
    """Context that translates errors of calls on the group. group: None stands for the default group."""
    refuse(group, label)
    try:
        yield
    except RuntimeError as error:
        if is_failure(error):
            raise translated_error(group, label, error) from error
        raise


@contextmanager
def translated_over(mesh: Any, label: str) -> Iterator[None]:
    """Context that translates errors of calls on any process group of a DeviceMesh."""
    groups = mesh.get_all_groups()
    for group in groups:
        refuse(group, label)
    try:
        yield
    except RuntimeError as error:
        if not is_failure(error):
            raise
        # The error does not say which group failed. The other groups are unharmed, except for broken connections.
        raise translated_error(_failing(groups), label, error) from error


def _failing(groups: Sequence[Any]) -> Any:
    return next((group for group in groups if has_broken(group)), groups[0])


def all_reduce(tensor: Tensor, group: Any, label: str, op: Any = dist.ReduceOp.SUM) -> None:
    _run_blocking(dist.all_reduce, group, label, tensor, op=op)


def reduce(tensor: Tensor, to: int, group: Any, label: str) -> None:
    """Reduces the tensor to one rank. to: a global rank."""
    _run_blocking(dist.reduce, group, label, tensor, dst=to)


def broadcast(tensor: Tensor, group: Any, label: str) -> None:
    """Broadcasts the tensor of the group's first rank."""
    _run_blocking(dist.broadcast, group, label, tensor, group_src=0)


def broadcast_from(tensor: Tensor, sender: int, group: Any, label: str) -> Call:
    """Starts the broadcast of a rank's tensor. sender: a rank in the group."""
    with translated(group, label):
        return Call(dist.broadcast(tensor, group=group, group_src=sender, async_op=True), group, label)


def all_gather(into: list[Tensor], own: Tensor, group: Any, label: str) -> Call:
    return _start(dist.all_gather, group, label, into, own)


def all_gather_into_tensor(into: Tensor, own: Tensor, group: Any, label: str) -> Call:
    return _start(dist.all_gather_into_tensor, group, label, into, own)


def all_to_all_single(
    into: Tensor, sent: Tensor, group: Any, label: str, sizes: tuple[list[int], list[int]] | None = None
) -> Call:
    """Starts an all-to-all. sizes: how many elements of `into` come from each rank, and how many of `sent` go to each
    rank; None: equal parts."""
    of_into, of_sent = (None, None) if sizes is None else sizes
    return _start(dist.all_to_all_single, group, label, into, sent, of_into, of_sent)


def new_group(
    ranks: Iterable[int],
    timeout: datetime.timedelta,
    parent_group: Any,
    label: str,
    backend: str = "gloo",
    pg_options: Any = None,
) -> Any:
    """Returns a new group of these global ranks, which are the ranks of `parent_group`. Only these ranks call it.
    backend, pg_options: as torch's."""
    with translated(parent_group, label):
        return dist.new_group(
            list(ranks), timeout, backend=backend, pg_options=pg_options, use_local_synchronization=True
        )


def _start(call: Callable[..., Any], group: Any, label: str, *args: Any) -> Call:
    """Starts a collective and returns its work; errors are translated here and in the work's wait."""
    with translated(group, label):
        return Call(call(*args, group=group, async_op=True), group, label)


def _run_blocking(call: Callable[..., Any], group: Any, label: str, *args: Any, **options: Any) -> None:
    """Runs a blocking collective; errors are translated."""
    with translated(group, label):
        call(*args, group=group, **options)


def send(message: Tensor, group: dist.ProcessGroup, to: int, tag: int) -> Any:
    """Starts to send a message. to: a rank in the group. This, and the returned Work, raise the back end's own error,
    untranslated: the code that waits for several messages knows which ranks are missing (`comm/gloo_p2p.py`)."""
    return group.send([message], to, tag)


def receive(into: torch.Tensor, group: dist.ProcessGroup, sender: int, tag: int) -> Any:
    """Starts to receive a message; errors as in `send`. sender: a rank in the group."""
    return group.recv([into], sender, tag)
