"""Host memory for batches, and the lanes of the library for GPUs: what becomes of them when more is asked for."""

from types import SimpleNamespace
from typing import Any

import host_parts
import pytest
import torch

from torch_ext import _staged, _staging


def test_memory_that_is_left_for_a_larger_one_was_sent_before() -> None:
    down, up = host_parts.LateLane(), host_parts.LateLane()
    lanes = _staging.lanes_of(torch.device("cpu"))._replace(down=down, up=up)
    buffers = _staging.Buffers(lanes, torch.device("cpu"))
    small = buffers.take("batches", 0, 100)
    assert buffers.take("batches", 0, 40) is small
    there = torch.zeros(100, dtype=torch.uint8)
    small.fill_(5)
    up.copy([there], [small])
    assert not there.eq(5).any()
    assert buffers.take("batches", 0, 101).numel() >= 101
    assert there.eq(5).all()


def test_lanes_of_a_gpu_are_made_for_as_many_slots_as_threads_need(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, ...]] = []

    class Made:
        def __init__(self, *arguments: int) -> None:
            made.append(arguments)
            self.native = _staged.NativeLanes()

    def lane(stream: int) -> Any:
        return SimpleNamespace(stream=SimpleNamespace(device_index=3, cuda_stream=stream))

    monkeypatch.setattr(_staged, "CudaLanes", Made)
    native = _staging.NativeOfCuda(lane(7), lane(8))
    first = native(6)
    assert native(6) == first == native(3)
    second = native(12)
    assert second != first and native(6) == second
    assert made == [(3, 7, 8, 6), (3, 7, 8, 12)]
    assert _staged.NativeLanes.from_address(first).size == 0, "copies may be under way in the earlier ones"
