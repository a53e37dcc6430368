"""parallelize with no_shard: a gradient's life (E3), one reduction per cycle (E5), the scale (E6), no_sync (E8)."""

import time
from typing import Any

import pytest
import ranks
import torch
from gradients import BF16, FP16, FP32, Given, bits, policy

import torch_ext

A = ([1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0])
B = ([1.0] * 4, [3.0] * 4)
MEAN_A, SUM_A = [3.0, 4.0, 5.0, 6.0], [6.0, 8.0, 10.0, 12.0]
MEAN_AB, SUM_AB = [5.0, 6.0, 7.0, 8.0], [10.0, 12.0, 14.0, 16.0]
DTYPES = [
    pytest.param(FP32, None, None, id="fp32"),
    pytest.param(BF16, None, None, id="bf16"),
    pytest.param(BF16, FP32, FP32, id="bf16-main-fp32"),
    pytest.param(BF16, FP32, BF16, id="bf16-main-fp32-wire-bf16"),
    pytest.param(FP32, FP32, BF16, id="fp32-wire-bf16"),
    pytest.param(FP16, None, None, id="fp16"),
]


def _two_microbatches(rank: int, world: int, dtypes: Any, factor: float | None, how: str) -> dict[str, Any]:
    """Runs two micro-batches in one of several ways; returns `.grad` between and after them."""
    model = Given([4], dtypes[0])
    torch_ext.parallelize(model, policy(*dtypes), gradient_divide_factor=factor)
    a, b = torch.tensor(A[rank]), torch.tensor(B[rank])
    seen = {}
    if how == "no_sync":
        with model.no_sync():
            model([a]).backward()
        seen["between"] = model.p0.grad.tolist()
    elif how == "two reductions":
        model([a]).backward()
        seen["between"] = model.p0.grad.tolist()
    elif how == "zeroed in place":
        model([a]).backward()
        model.zero_grad(set_to_none=False)
    elif how == "zeroed to None":
        model([a]).backward()
        model.zero_grad()
    model([b if how != "one" else a]).backward()
    seen["after"] = model.p0.grad.tolist()
    seen["dtype"] = model.p0.grad.dtype
    return seen


@pytest.mark.parametrize("dtypes", [pytest.param(d.values, id=d.id) for d in DTYPES])
@pytest.mark.parametrize(
    ("how", "mean", "total"),
    [
        pytest.param("one", MEAN_A, SUM_A, id="one microbatch"),
        pytest.param("no_sync", MEAN_AB, SUM_AB, id="E5-once per cycle"),
        pytest.param("two reductions", MEAN_AB, SUM_AB, id="E5-without no_sync nothing counts twice"),
        pytest.param("zeroed in place", [2.0] * 4, [4.0] * 4, id="E5-zeroed in place"),
        pytest.param("zeroed to None", [2.0] * 4, [4.0] * 4, id="E5-zeroed to None"),
    ],
)
def test_e5_microbatches(dtypes: Any, how: str, mean: list[float], total: list[float]) -> None:
    for factor, expected in ((None, mean), (1.0, total)):
        for rank, seen in enumerate(ranks.run(2, _two_microbatches, dtypes, factor, how)):
            assert seen["after"] == expected
            assert seen["dtype"] == (dtypes[1] or (FP32 if dtypes[0] == FP16 else dtypes[0]))
            if how == "no_sync":
                assert seen["between"] == A[rank], "E3: the local gradient, untouched by any other rank"


def _scaled(rank: int, world: int, dtypes: Any, factor: float) -> list[float]:
    model = Given([4], dtypes[0])
    torch_ext.parallelize(model, policy(*dtypes), gradient_divide_factor=factor)
    model([torch.tensor([1.0, 2.0, 3.0, 4.0])]).backward()
    return model.p0.grad.tolist()


@pytest.mark.parametrize("dtypes", [pytest.param(d.values, id=d.id) for d in DTYPES])
def test_e6_one_rank_scales_too(dtypes: Any) -> None:
    assert ranks.run(1, _scaled, dtypes, 4.0) == [[0.25, 0.5, 0.75, 1.0]]


def _mean_of_three(rank: int, world: int) -> list[float]:
    model = Given([3], BF16)
    torch_ext.parallelize(model, policy(BF16))
    model([torch.tensor([1.0, 0.5, 2.0])]).backward()
    return model.p0.grad.tolist()


def test_e6_the_scale_is_fp32() -> None:
    # 1/3 in bf16 is 0.3340: the mean of three equal values would come out 0.2 % too large.
    assert ranks.run(3, _mean_of_three) == [[1.0, 0.5, 2.0]] * 3


def _nested(rank: int, world: int) -> list[list[float]]:
    """Returns the gradient after backwards in nested no_sync and sync contexts."""
    model = Given([1], FP32)
    torch_ext.parallelize(model, policy())
    mine = torch.tensor([2.0 if rank else 4.0])
    seen = []

    def backward() -> None:
        model.zero_grad()
        model([mine]).backward()
        seen.append(model.p0.grad.tolist()[0])

    backward()
    with model.no_sync():
        backward()
        with model.sync():
            backward()
            with model.no_sync():
                backward()
            backward()
        backward()
        with model.no_sync():
            backward()
        backward()
    backward()
    try:
        with model.no_sync():
            raise KeyError
    except KeyError:
        backward()
    with model.sync():
        backward()
    return seen


def test_e8_no_sync_and_sync_nest_and_restore() -> None:
    local, mean = [4.0, 2.0], 3.0
    for rank, seen in enumerate(ranks.run(2, _nested)):
        reduced = [True, False, True, False, True, False, False, False, True, True, True]
        assert seen == [mean if r else local[rank] for r in reduced]


def _graph_kept(rank: int, world: int) -> list[list[float]]:
    """Gradients leave the flat buffer: by create_graph=True, and because the user replaces `.grad`."""
    model = Given([2], BF16)
    torch_ext.parallelize(model, policy(BF16, FP32, BF16))
    seen = []
    with model.no_sync():
        loss = model([torch.tensor([1.0, 2.0]) * (rank + 1)])
        loss.backward(create_graph=True)  # autograd then accumulates out of place, into a tensor outside of the buffer
        seen.append(model.p0.grad.requires_grad)
        loss.backward(create_graph=True)
        model.p0.grad = model.p0.grad + 1.0  # the user's own tensor becomes the gradient
    loss.backward()
    seen.append(model.p0.grad.tolist())
    return seen


def test_e3_a_gradient_that_left_the_buffer_comes_back() -> None:
    assert ranks.run(2, _graph_kept) == [[False, [5.5, 10.0]]] * 2


def _other_shapes(rank: int, world: int) -> None:
    """Trains tied, frozen, empty, scalar and transposed parameters."""
    weight = torch.randn(4, 6).t()  # not contiguous
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(weight)
    model.empty = torch.nn.Parameter(torch.empty(0, 3))
    model.scalar = torch.nn.Parameter(torch.tensor(1.5))
    model.frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    model.tied = model.w
    torch_ext.parallelize(model, policy())
    x = torch.arange(24.0).view(6, 4) * (rank + 1)
    ((model.w * x).sum() + (model.tied * x).sum() + model.scalar * (rank + 1) + model.empty.sum()).backward()
    assert model.w.grad.tolist() == (torch.arange(24.0).view(6, 4) * 3.0).tolist()
    assert model.scalar.grad.item() == 1.5 and model.empty.grad.shape == (0, 3) and model.frozen.grad is None


def _converted(rank: int, world: int) -> None:
    """Converts a convolution to channels_last between two backwards, which moves its gradients out of the buffer."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 5, 3)))
    model, plain = models
    torch_ext.parallelize(model, policy(FP32))
    for step in range(3):
        model.zero_grad()
        plain.zero_grad()
        for backward in range(2):
            x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(2 * step + backward))
            model(x).square().mean().backward()
            plain(x).square().mean().backward()
            if step == 1 and backward == 0:
                model.to(memory_format=torch.channels_last)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)


def test_e3_a_gradient_that_a_conversion_moved_comes_back() -> None:
    ranks.run(2, _converted)


def test_tied_frozen_empty_scalar_and_transposed_parameters() -> None:
    ranks.run(2, _other_shapes)


def _freezes_later(rank: int, world: int) -> None:
    model = Given([2, 2])
    torch_ext.parallelize(model, policy())
    ones = torch.ones(2)
    model([ones, ones]).backward()
    model.zero_grad()
    model.p1.requires_grad_(False)
    model([ones * (rank + 1), ones]).backward()
    assert model.p0.grad.tolist() == [1.5, 1.5] and model.p1.grad is None


def test_f5_a_parameter_frozen_later_is_not_waited_for() -> None:
    ranks.run(2, _freezes_later)


def _overlaps(rank: int, world: int, overlap: bool) -> bool:
    """Returns whether the first bucket's sum is there while backward is still busy with the last parameter."""
    model = Given([300, 300, 300])
    torch_ext.parallelize(model, policy(FP32, FP32, BF16, bucket_size=300, overlap_grad_reduce=overlap))
    seen = []

    def busy(grad: torch.Tensor) -> None:
        deadline = time.monotonic() + (10.0 if overlap else 0.1)
        while time.monotonic() < deadline and model.p2.grad.unique().tolist() != [1.5]:
            time.sleep(0.001)
        seen.append(model.p2.grad.unique().tolist())

    model([torch.ones(300)] * 3).backward()  # records the order of the gradients
    model.zero_grad()
    model.p0.register_hook(busy)
    model([torch.full((300,), 1.0 + rank)] * 3).backward()
    assert model.p0.grad.unique().tolist() == [1.5]
    return seen == [[1.5]]


@pytest.mark.parametrize("overlap", [True, False])
def test_buckets_are_reduced_while_backward_goes_on(overlap: bool) -> None:
    assert ranks.run(2, _overlaps, overlap) == [overlap] * 2


def _bytes_on_the_wire(rank: int, world: int) -> int:
    model = Given([10000], FP32)
    torch_ext.parallelize(model, policy(FP32, FP32, BF16, grad_comm_compression="off"))
    model([torch.ones(10000)]).backward()
    return model.wire_bytes()


def test_wire_bytes_counts_what_was_sent() -> None:
    padded = 10240  # 10000 to a multiple of 2 * 128
    for sent in ranks.run(2, _bytes_on_the_wire):
        # In bf16: half of the bucket as parts, half as the sum. Then the report: 16 bytes and one per parameter.
        assert sent == padded * 2 + 17


def _with_the_step(rank: int, world: int, strategy: str) -> list[int]:
    """Returns the wire bytes after a backward, its step, another backward and its step."""
    model = Given([10000], FP32)
    torch_ext.parallelize(model, policy(FP32, FP32, BF16, grad_comm_compression="off"), strategy=strategy)
    optimizer = torch_ext.AdamW(model.parameters())
    found = []
    for _ in range(2):
        model([torch.ones(10000)]).backward()
        found.append(model.wire_bytes())
        optimizer.step()
        found.append(model.wire_bytes())
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize(
    ("strategy", "reduced", "gathered"),
    [
        ("no_shard", 10240 * 2, 0),  # parts and sums, in bf16
        ("optim", 10240, 10240 * 2),  # parts in bf16, then half of the weights in fp32
        ("optim_grads", 10240, 10240 * 2),
    ],
)
def test_wire_bytes_counts_the_weights_that_a_step_gathers(strategy: str, reduced: int, gathered: int) -> None:
    for found in ranks.run(2, _with_the_step, strategy):
        assert found == [reduced + 17, reduced + 17 + gathered] * 2


def _one_thread_many_steps(rank: int, world: int) -> list[bytes]:
    """Trains 20 steps and returns the bits of the weights."""
    torch.manual_seed(rank)  # the ranks' weights differ; rank 0's are used
    model = torch.nn.Sequential(
        torch.nn.Linear(20, 40), torch.nn.BatchNorm1d(40), torch.nn.Tanh(), torch.nn.Linear(40, 3)
    )
    torch_ext.parallelize(model, policy(bucket_size=100, overlap_grad_reduce=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(20):
        x = torch.randn(8, 20, generator=torch.Generator().manual_seed(10 * step + rank))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return bits(list(model.parameters()))


def test_ranks_stay_equal_to_the_bit() -> None:
    first, *others = ranks.run(3, _one_thread_many_steps)
    assert all(other == first for other in others)
