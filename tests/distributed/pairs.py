"""Buckets that travel two by two, whatever was measured: what joining does, from the first cycle on."""

from typing import Any

from torch_ext.parallel import bucket_joining


class Pairs(bucket_joining.BucketJoining):
    """Of a plan whose buckets lie in one buffer; takes BucketJoining's place."""

    def __init__(self, plan: Any, *_: Any) -> None:
        super().__init__(plan, False)
        n = len(plan.buckets)
        self.ends = frozenset([*range(2, n, 2), n])
