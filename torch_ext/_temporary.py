"""Buckets in other dtypes than the buffers': made just before a bucket travels, freed as soon as its sum is
installed."""

import torch

from torch_ext._exchange import Exchange
from torch_ext._wire import Wire


class TemporaryBuckets:
    """For each bucket at most one that leaves and one that sums are gathered in, at a time."""

    def __init__(self, exchange: Exchange) -> None:
        """exchange: which lends the memory."""
        self._exchange = exchange
        self._wires: dict[tuple[int, bool], Wire] = {}

    def __len__(self) -> int:
        """How many have not been given back."""
        return len(self._wires)

    def take(self, bucket: int, numel: int, dtype: torch.dtype, *, gathered: bool = False) -> Wire:
        """The bucket's memory, of no particular content.

        Raises RuntimeError where the bucket has one of another size or dtype: somebody still reads it.
        """
        wire = self._wires.get((bucket, gathered))
        if wire is None:
            wire = self._wires[bucket, gathered] = self._exchange.borrow(
                numel, dtype, "gathered" if gathered else "wire"
            )
        if wire.data.numel() != numel or wire.data.dtype != dtype:
            raise RuntimeError(
                f"bucket {bucket} has {wire.data.numel()} elements of {wire.data.dtype} in use; it cannot be had as "
                f"{numel} of {dtype} before it is given back"
            )
        return wire

    def give_back(self, bucket: int, *, gathered: bool = False) -> None:
        """Frees the bucket's memory, if it has any. Any thread."""
        wire = self._wires.pop((bucket, gathered), None)
        if wire is not None:
            self._exchange.give_back(wire)
