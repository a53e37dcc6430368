"""plan_buckets: the bucket planner as Python sees it (F1 to F4, F6). The rules themselves are tested in C."""

from typing import Any

import pytest
import torch
from gradients import BF16, FP32, policy

import torch_ext


def _places(plan: Any) -> list[tuple[int, int]]:
    """Returns the beginning and end of each parameter in its flat buffer."""
    return [(p.start, p.start + p.numel) for p in plan.parameters]


def test_f4_golden_case() -> None:
    plan = torch_ext.plan_buckets([100, 10000, 100], policy(bucket_size=9000, overlap_grad_reduce=True), 3)
    assert _places(plan) == [(10368, 10468), (128, 10128), (0, 100)]
    assert [(b.start, b.start + b.numel, b.start + b.used) for b in plan.buckets] == [
        (0, 10368, 10128),
        (10368, 10752, 10468),
    ]
    assert [p.bucket for p in plan.parameters] == [1, 0, 0] and plan.world_size == 3
    assert plan.in_bucket(0) == [2, 1] and plan.in_bucket(1) == [0]


def test_f1_dtypes_do_not_share_a_buffer_and_tied_parameters_count_once() -> None:
    weight, norm = torch.nn.Parameter(torch.zeros(300, dtype=BF16)), torch.nn.Parameter(torch.zeros(5))
    plan = torch_ext.plan_buckets({"embed": weight, "norm": norm, "head": weight}, torch_ext.load_policy(BF16), 2)
    embed, normed, head = plan.parameters
    assert (embed.buffer, embed.start) == (head.buffer, head.start) and normed.buffer != embed.buffer
    assert {(b.main_grads_dtype, b.numel) for b in plan.buckets} == {(BF16, 512), (FP32, 256)}
    assert len(plan.buffers) == 2


def test_f2_no_overlap_one_bucket() -> None:
    sizes = [5000] * 10
    many = torch_ext.plan_buckets(sizes, policy(bucket_size=5000, overlap_grad_reduce=True), 2)
    assert len(many.buckets) == 10
    assert len(torch_ext.plan_buckets(sizes, policy(bucket_size=5000, overlap_grad_reduce=False), 2).buckets) == 1


def test_f2_default_cap_follows_the_model_and_the_ranks() -> None:
    def buckets(layers: int, world: int, wire: Any = None, size: int | None = None) -> int:
        plan = torch_ext.plan_buckets([65536] * layers, policy(BF16, wire=wire, bucket_size=size), world)
        return len(plan.buckets)

    assert buckets(4, 2) == 1 and buckets(64, 2) == 16  # buckets of 512 KiB
    assert buckets(192, 2) == 32  # buckets of 768 KiB
    assert buckets(192, 2, wire=FP32) == 32 and buckets(64, 2, wire="fp8") == 4
    assert buckets(64, 16) == 2  # buckets of 6.5 MiB
    assert buckets(64, 2, size=65536) == 64


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_f3_alignment(world: int) -> None:
    plan = torch_ext.plan_buckets([1, 127, 128, 129, 0, 5], policy(bucket_size=128, overlap_grad_reduce=True), world)
    assert all(p.start % 128 == 0 for p in plan.parameters)
    assert all(b.start % (128 * world) == 0 and b.numel % (128 * world) == 0 for b in plan.buckets)


def test_order_places_parameters_as_asked() -> None:
    plan = torch_ext.plan_buckets([10, 20, 30], policy(), 1, order=[1, 0, 2])
    assert [p.start for p in plan.parameters] == [128, 0, 256]


MODEL = {"a": (3, 4), "b": (12,)}


def _fingerprint(shapes: dict[str, tuple[int, ...]] = MODEL, world: int = 2, **policy_of: Any) -> int:
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    return torch_ext.plan_buckets(tensors, policy(**policy_of), world).fingerprint


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"shapes": {"a": (4, 3), "b": (12,)}}, id="shape"),
        pytest.param({"shapes": {"a": (3, 4), "c": (12,)}}, id="name"),
        pytest.param({"shapes": {"b": (12,), "a": (3, 4)}}, id="order"),
        pytest.param({"world": 3}, id="world"),
        pytest.param({"wire": BF16}, id="wire dtype"),
        pytest.param({"bucket_size": 1, "overlap_grad_reduce": True}, id="plan"),
    ],
)
def test_f6_fingerprint_tells_layouts_apart(other: dict[str, Any]) -> None:
    assert _fingerprint() == _fingerprint() != _fingerprint(**other)


def test_print_shows_the_plan() -> None:
    text = str(torch_ext.plan_buckets({"w": torch.zeros(2, 3), "b": torch.zeros(3)}, policy(wire=BF16), 2))
    assert text.startswith("layout ") and "1 bucket over 2 ranks" in text
    assert "float32, bfloat16 on the wire" in text and "[128, 134) w [2, 3] float32" in text


@pytest.mark.parametrize(
    ("given", "kwargs", "kind", "words"),
    [
        pytest.param([-1], {}, ValueError, "'0'.*-1 elements", id="negative"),
        pytest.param({"w": "many"}, {}, TypeError, "'w': str", id="no tensor"),
        pytest.param({"w": torch.zeros(2, dtype=torch.float64)}, {}, TypeError, "'w'.*float64", id="float64"),
        pytest.param([3], {"order": [0, 0]}, ValueError, "order has 2 entries for 1", id="order length"),
        pytest.param([3, 4], {"order": [0, 0]}, ValueError, "order holds 0 twice", id="order twice"),
        pytest.param([3], {"world_size": 0}, ValueError, "world", id="no rank"),
    ],
)
def test_what_is_refused(given: Any, kwargs: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        torch_ext.plan_buckets(given, policy(), **{"world_size": 1, **kwargs})


@pytest.mark.parametrize("cap", [0, -5])
def test_a_bucket_cap_of_zero_is_refused(cap: int) -> None:
    with pytest.raises(ValueError, match="bucket_size"):
        policy(bucket_size=cap)


def test_the_8_bit_wire_is_planned_and_gradients_of_8_bits_are_refused() -> None:
    (bucket,) = torch_ext.plan_buckets([300], policy(BF16, wire="fp8"), 2).buckets
    assert (bucket.main_grads_dtype, bucket.grad_comm_dtype, bucket.numel) == (BF16, torch.uint8, 512)
    with pytest.raises(ValueError, match="main_grads_dtype='fp8' is not legal; legal: none, fp32, fp16, bf16"):
        policy(main="fp8")
