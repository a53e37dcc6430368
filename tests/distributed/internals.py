"""What several tests put into private modules, since no public name reaches it: sums and messages that are late, and
buckets that travel two by two whatever the link carries. Who imports this depends on private names
(tests/package/test_sources.py).
"""

from collections.abc import Callable
from typing import Any

import pytest

from torch_ext.comm import group_calls
from torch_ext.comm.wire import reduce_chunks
from torch_ext.parallel import bucket_mean, message_plan
from torch_ext.parallel.strategies import optim, optim_grads


def before_sums(does: Callable[[], object], patch: pytest.MonkeyPatch | None = None) -> None:
    """`does` is called before received chunks are summed, under every strategy of ours.

    patch: what undoes it; None: it stays for the process.
    """
    patch = pytest.MonkeyPatch() if patch is None else patch

    def add_up(*arguments: Any, **options: Any) -> None:
        does()
        reduce_chunks(*arguments, **options)

    for module in (bucket_mean, optim, optim_grads):
        patch.setattr(module, "reduce_chunks", add_up)


def after_waiting(does: Callable[[], object]) -> None:
    """`does` is called when a collective was waited for, in this process from here on."""
    waits = group_calls.Call.wait

    def wait(call: group_calls.Call) -> None:
        waits(call)
        does()

    pytest.MonkeyPatch().setattr(group_calls.Call, "wait", wait)


def join_pairs(patch: pytest.MonkeyPatch | None = None) -> None:
    """Buckets of models that are parallelized from here on travel two by two: of plans whose buckets lie in one buffer.
    patch: as above."""

    def pairs(buckets: Any, *_: Any) -> message_plan.Messages:
        n = len(buckets)
        return message_plan.Messages(ends=(*range(2, n, 2), n))

    (pytest.MonkeyPatch() if patch is None else patch).setattr(message_plan, "decide", pairs)
