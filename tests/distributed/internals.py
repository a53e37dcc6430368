"""What several tests put into private modules, since no public name reaches it: sums that are late, and buckets that
travel two by two whatever was measured. Who imports this depends on private names (tests/package/test_sources.py).
"""

from collections.abc import Callable
from typing import Any

import pytest

from torch_ext.comm.wire import reduce_chunks
from torch_ext.parallel import bucket_exchange, bucket_joining, bucket_mean
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


class Pairs(bucket_joining.BucketJoining):
    """Joins the buckets of a plan whose buckets lie in one buffer, from the first cycle on."""

    def __init__(self, plan: Any, *_: Any) -> None:
        super().__init__(plan, False)
        n = len(plan.buckets)
        self.ends = frozenset([*range(2, n, 2), n])


def join_pairs(patch: pytest.MonkeyPatch | None = None) -> None:
    """Buckets of models that are parallelized from here on travel two by two. patch: as above."""
    (pytest.MonkeyPatch() if patch is None else patch).setattr(bucket_exchange, "BucketJoining", Pairs)
