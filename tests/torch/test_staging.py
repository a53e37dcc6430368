"""Host memory for batches, and the lanes of the library for GPUs: what becomes of them when more is asked for."""

from types import SimpleNamespace
from typing import Any

import host_parts
import pytest
import torch
from torch import nn
from training import bits, policy_of, set_grads

import torch_ext
from torch_ext import _staged, _staging, _tensors
from torch_ext._host_plan import HostPlan


def test_memory_that_is_left_for_a_larger_one_was_sent_before() -> None:
    down, up = host_parts.LateLane(), host_parts.LateLane()
    lanes = _staging.lanes_of(torch.device("cpu"))._replace(down=down, up=up)
    buffers = _staging.Buffers(lanes, torch.device("cpu"))
    small = buffers.take("batches", 100)
    assert buffers.take("batches", 40) is small
    there = torch.zeros(100, dtype=torch.uint8)
    small.fill_(5)
    up.copy([there], [small])
    assert not there.eq(5).any()
    assert buffers.take("batches", 101).numel() >= 101
    assert there.eq(5).all()


@pytest.mark.parametrize("first", [torch.bfloat16, torch.float32])
def test_buckets_of_other_dtypes_do_not_lie_where_weights_are_leaving_from(first: torch.dtype) -> None:
    """Two buckets of one step: the first one's weights are on their way up when the second one's gradients come."""

    def model() -> list[nn.Parameter]:
        generator = torch.Generator().manual_seed(4)
        return [nn.Parameter(torch.randn(9000, generator=generator).to(t)) for t in (torch.bfloat16, torch.float32) * 2]

    def made(fraction: float) -> tuple[torch_ext.AdamW, list[nn.Parameter]]:
        params = model()
        optimizer = torch_ext.AdamW(params, lr=1e-2, policy=policy_of("a"), offload_fraction=fraction)
        for step in range(2):
            set_grads(params, step)
            optimizer.step()
        return optimizer, params

    reference, expected = made(0.0)
    with host_parts.lanes("late"):
        optimizer, params = made(1.0)
    assert optimizer._plan is not None and optimizer._plan.host is not None
    members = optimizer._plan.host.members
    buckets: list[Any] = ["first" if m.weight.dtype == first else "second" for m in members]
    assert optimizer._host._buffers is not None
    plan = HostPlan(members, buckets, {}, optimizer._host._buffers)
    for one in (params, expected):
        set_grads(one, 2)
    none = _tensors.NONE
    with torch.no_grad():
        plan.begin([p.grad for p in params], optimizer._current_hyper(), (none, none, none), sample=False, external=0)
        for bucket in ("first", "second"):
            plan._calls[bucket].run(plan._buffers)  # as `step`, which has a device wait here, but nobody on the host
        plan.end()
    reference.step()
    assert [bits(p) for p in params] == [bits(p) for p in expected]


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
