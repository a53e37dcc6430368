"""Computes the mean of one bucket, which every rank gets whole: for no_shard and DistributedDataParallel's buckets."""

from collections.abc import Sequence

import torch

from torch_ext.comm.communicator import Part
from torch_ext.comm.wire import ParamSlice, RoundingSeeds, WireBuffer, pack, reduce_chunks
from torch_ext.parallel.bucket_plan import slices as slices_in


class BucketMean:
    """The mean of one bucket: each rank adds up one part and rounds it once to the dtype in which sums are gathered;
    then the parts are all-gathered."""

    gathered: WireBuffer
    """The buffer into which the ranks' parts are gathered; set before `reduce` is called."""

    def __init__(self, slices: Sequence[ParamSlice], ids: Sequence[int], divide_factor: float, cycle: int) -> None:
        """slices: of the parameters in the bucket. ids, cycle: the parameters' ids and the cycle's number, for the
        rounding thresholds of an 8-bit `gathered`."""
        self.slices, self._ids, self._cycle = slices, ids, cycle
        self._scale = 1.0 / divide_factor

    def reduce(self, chunks: Sequence[WireBuffer], part: Part) -> None:
        """ReduceFn: writes the chunks' mean into this part of `gathered`. Called on any thread."""
        own = self.gathered.part(*part)
        if not own.coded:
            reduce_chunks(chunks, own.data, self._scale)
            return
        numel = own.data.numel()
        total = torch.empty(numel, dtype=torch.float32, device=own.data.device)
        reduce_chunks(chunks, total, self._scale)
        mine = slices_in(self.slices, [(part.number * numel, (part.number + 1) * numel)])
        values = [total[p.at : p.at + p.numel] for p in mine]
        pack(values, mine, self._ids, own, RoundingSeeds.of_sums(self._cycle))
