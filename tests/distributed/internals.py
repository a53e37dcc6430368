"""Patches of private modules that several tests share, where no public name reaches: late sums, late messages, and
buckets that travel in pairs whatever the link's speed.

A test that imports this file depends on private names (tests/package/test_sources.py lists them).
"""

from collections.abc import Callable
from typing import Any

import pytest

from torch_ext.comm import group_calls
from torch_ext.comm.wire import reduce_chunks
from torch_ext.parallel import bucket_mean, message_plan
from torch_ext.parallel.strategies import optim, optim_grads


def before_sums(does: Callable[[], object], patch: pytest.MonkeyPatch | None = None) -> None:
    """Calls `does` before received chunks are summed, under every strategy of ours.

    patch: undoes it at its end; None: it stays for the life of the process.
    """
    patch = pytest.MonkeyPatch() if patch is None else patch

    def add_up(*arguments: Any, **options: Any) -> None:
        does()
        reduce_chunks(*arguments, **options)

    for module in (bucket_mean, optim, optim_grads):
        patch.setattr(module, "reduce_chunks", add_up)


def after_waiting(does: Callable[[], object]) -> None:
    """Calls `does` after each wait for a collective, from now on in this process."""
    waits = group_calls.Call.wait

    def wait(call: group_calls.Call) -> None:
        waits(call)
        does()

    pytest.MonkeyPatch().setattr(group_calls.Call, "wait", wait)


def join_pairs(patch: pytest.MonkeyPatch | None = None) -> None:
    """Sends the buckets of models that are parallelized from now on in pairs. Only for plans with one flat buffer.

    patch: see `before_sums`."""

    def pairs(buckets: Any, *_: Any) -> message_plan.Messages:
        n = len(buckets)
        return message_plan.Messages(ends=(*range(2, n, 2), n))

    (pytest.MonkeyPatch() if patch is None else patch).setattr(message_plan, "decide", pairs)
