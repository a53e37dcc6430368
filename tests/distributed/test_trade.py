"""Two ranks that both want a sum trade whole buckets (`comm/gloo.py`): when, and that nothing leaves that is
written."""

from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist

from torch_ext.comm import communicator, factory
from torch_ext.comm.communicator import Part
from torch_ext.comm.wire import WireBuffer, reduce_chunks


class Waited:
    """A message whose wait is noted."""

    def __init__(self, work: dist.Work, waits: list[str]) -> None:
        self.work, self.waits = work, waits

    def wait(self) -> None:
        self.work.wait()
        self.waits.append("sent")

    def is_completed(self) -> bool:
        return self.work.is_completed()


def _all_reduced(_rank: int, world: int, scattered: bool) -> tuple[list[Any], list[float], int]:
    """What happened in which order, the sums, and the bytes sent for 256 elements of fp32 per rank."""
    exchange = factory.make_communicator(dist.group.WORLD, torch.device("cpu"))
    happened: list[Any] = []
    send = exchange.send  # type: ignore[attr-defined]
    exchange.send = lambda *args: [(peer, Waited(work, happened)) for peer, work in send(*args)]  # type: ignore[attr-defined]
    main = torch.full((256 * world,), 1.0 + exchange.rank)

    def install(chunks: Any, part: Part) -> None:
        happened.append(tuple(part))
        reduce_chunks(chunks, WireBuffer.of(main).part(*part).data, 0.5)

    result = None if scattered else WireBuffer.of(main)
    exchange.reduce_scatter(
        WireBuffer.of(main), install, result=result, tag=communicator.tag(3, 1, 0), label="a bucket"
    ).result()
    return happened, main.unique().tolist(), exchange.bytes_sent


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("scattered", [False, True])
def test_what_leaves_has_left_before_the_sum_is_written_over_it(world: int, scattered: bool) -> None:
    """In parts nothing overtakes: a rank's sum comes after it has all of our part, and is not where our own lies."""
    for rank, (happened, sums, sent) in enumerate(ranks.run(world, _all_reduced, scattered)):
        whole = world == 2 and not scattered
        mean = 0.5 * sum(range(1, world + 1))
        assert sums == ([mean] if not scattered else sorted({mean, 1.0 + rank}))
        assert happened.index((0, 1) if whole else (rank, world)) == (1 if whole else 0)
        assert sent == 1024 * (world - 1) * (1 if scattered else 2)
