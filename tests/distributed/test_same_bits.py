"""The bits of the sum must not depend on buckets, transport, or DDP; and the sum's error is small."""

from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from gradients import BF16, FP32, Given, bits, noise, on_all_ranks, policy
from torch.nn.parallel import DistributedDataParallel

import torch_ext

SHAPES = [(300,), (1,), (129, 3), (5, 5, 5), (5000,), (2,)]
WIRES = [
    pytest.param((FP32, FP32, FP32), id="fp32"),
    pytest.param((FP32, FP32, BF16), id="fp32-wire-bf16"),
    pytest.param((BF16, BF16, BF16), id="bf16"),
]


def _reduced(rank: int, dtypes: Any, group: Any = None, **ddp: Any) -> list[torch.Tensor]:
    """Returns the gradients of a second backward under no_shard."""
    model = Given(SHAPES, dtypes[0])
    torch_ext.parallelize(model, policy(*dtypes, **ddp), process_group=group)
    for seed in (1, 2):
        model.zero_grad()
        model(noise(seed, rank, SHAPES, dtypes[0])).backward()
    return [p.grad for p in model.parameters()]


def _hooked(rank: int, dtypes: Any, cap_mb: float, group: Any = None) -> list[torch.Tensor]:
    """Returns the gradients of a second backward in DDP with our hook."""
    model = DistributedDataParallel(Given(SHAPES, dtypes[0]), process_group=group, bucket_cap_mb=cap_mb)
    state = torch_ext.register_comm_hook(model, policy(*dtypes))
    for seed in (1, 2):  # DDP lays its buckets out again after the first
        model.zero_grad()
        model(noise(seed, rank, SHAPES, dtypes[0])).backward()
        assert (state.wire_bytes() > 0) == (dist.get_world_size() > 1)
    return [p.grad for p in model.parameters()]


def _all_ways(rank: int, world: int, dtypes: Any) -> None:
    """The gradients of all bucket sizes, of DDP and of collectives must have one reference's bits."""
    reference = _reduced(rank, dtypes)
    assert len(set(map(tuple, on_all_ranks(bits(reference))))) == 1, "all ranks have the same bits"
    for cap in (1, 300, 4000):
        assert bits(_reduced(rank, dtypes, bucket_size=cap, overlap_grad_reduce=True)) == bits(reference), f"cap {cap}"
    for cap_mb in (25.0, 0.002):
        assert bits(_hooked(rank, dtypes, cap_mb)) == bits(reference), f"DDP's buckets of {cap_mb} MB"
    group = ranks.group_with_collectives()
    collective = _reduced(rank, dtypes, group, bucket_size=300, overlap_grad_reduce=True)
    assert bits(collective) == bits(reference), "collectives"
    assert bits(_hooked(rank, dtypes, 0.002, group)) == bits(reference), "collectives in DDP"


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("dtypes", WIRES)
def test_bits_depend_on_no_bucket_and_no_transport(world: int, dtypes: Any) -> None:
    ranks.run(world, _all_ways, dtypes)


def _rank_order(rank: int, world: int) -> None:
    """Compares with a sum written in torch operations: in fp32, in rank order, rounded once."""
    for dtypes in (FP32, FP32, FP32), (FP32, FP32, BF16), (BF16, BF16, BF16), (BF16, FP32, BF16):
        grads = _reduced(rank, dtypes, bucket_size=300, overlap_grad_reduce=True)
        for i, grad in enumerate(grads):
            wires = [noise(2, r, SHAPES, dtypes[0])[i].to(dtypes[2]).float() for r in range(world)]
            total = wires[0].clone()
            for wire in wires[1:]:
                total += wire
            expected = (total * torch.tensor(1.0 / world, dtype=FP32)).to(dtypes[2]).to(dtypes[1])
            assert bits([grad]) == bits([expected])


def test_the_sum_is_fp32_in_rank_order_rounded_once() -> None:
    ranks.run(4, _rank_order)


def _errors(rank: int, world: int, microbatches: int) -> dict[str, float]:
    """Returns the relative error of the accumulated mean, for several dtypes and for DDP in bf16."""
    shape = [(20000,)]
    exact = sum(noise(s, r, shape, BF16)[0].double() for s in range(microbatches) for r in range(world)) / world
    exact_norm = exact.norm()

    def accumulated(model: Any) -> float:
        for s in range(microbatches):
            with model.no_sync() if s < microbatches - 1 else model.sync() if hasattr(model, "sync") else _nothing():
                model(noise(s, rank, shape, BF16)).backward()
        (grad,) = (p.grad for p in model.parameters())
        return float((grad.double() - exact).norm() / exact_norm)

    found = {}
    for name, main, wire in (("fp32", FP32, FP32), ("wire bf16", FP32, BF16), ("bf16", BF16, BF16)):
        found[name] = accumulated(torch_ext.parallelize(Given(shape, BF16), policy(BF16, main, wire)))
    found["stock DDP bf16"] = accumulated(DistributedDataParallel(Given(shape, BF16)))
    return found


def _nothing() -> Any:
    import contextlib

    return contextlib.nullcontext()


@pytest.mark.parametrize("microbatches", [1, 8])
def test_error_of_the_mean_against_float64(microbatches: int) -> None:
    found = ranks.run(4, _errors, microbatches)
    assert found.count(found[0]) == 4
    errors = found[0]
    one_rounding = 2.0**-9  # half a bf16 ulp, the largest relative error of one rounding; the rms is smaller
    assert errors["fp32"] < 1e-6
    assert errors["bf16"] < errors["stock DDP bf16"]
    if microbatches == 1:
        # bf16 gradients are sent exactly, so the only error is one rounding of the sum.
        assert errors["wire bf16"] < one_rounding and errors["wire bf16"] < errors["stock DDP bf16"] * 0.85
    else:
        assert errors["wire bf16"] < errors["stock DDP bf16"] * 0.7


def _subgroups(rank: int, world: int) -> None:
    """Trains in two data-parallel groups side by side, {0, 2} and {1, 3}."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    model = Given([3, 300])
    torch_ext.parallelize(model, policy(bucket_size=1, overlap_grad_reduce=True), process_group=groups[rank % 2])
    model([torch.full((3,), float(rank)), torch.full((300,), 2.0 * rank)]).backward()
    assert model.p0.grad.tolist() == [1.0 + rank % 2] * 3 and model.p1.grad.tolist() == [2.0 * (1 + rank % 2)] * 300
    with pytest.raises(RuntimeError, match="not a member"):
        torch_ext.parallelize(Given([3]), policy(), process_group=groups[1 - rank % 2])


def test_groups_of_ranks_beside_each_other() -> None:
    ranks.run(4, _subgroups)


def _two_models(rank: int, world: int) -> None:
    """Runs one backward through two models with different groups."""
    one, two = Given([200]), Given([300, 2])
    torch_ext.parallelize(one, policy())
    torch_ext.parallelize(two, policy(), process_group=dist.new_group())
    mine = float(rank)
    for _ in range(3):
        one.zero_grad(), two.zero_grad()
        (one([torch.full((200,), mine)]) + two([torch.full((300,), mine), torch.full((2,), mine + 1)])).backward()
        assert one.p0.grad.unique().tolist() == [0.5] and two.p1.grad.unique().tolist() == [1.5]


def test_two_models_in_one_backward() -> None:
    ranks.run(2, _two_models)


def _loop(rank: int, model: torch.nn.Module, steps: int) -> list[float]:
    """Trains the model and returns the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(steps):
        x = torch.randn(16, 12, generator=torch.Generator().manual_seed(100 * step + rank))
        loss = (model(x) - x.sin().sum(1, keepdim=True)).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def _against_ddp(rank: int, world: int) -> None:
    """Trains the same model under no_shard and under DDP."""

    def make() -> torch.nn.Module:
        torch.manual_seed(3)
        return torch.nn.Sequential(
            torch.nn.Linear(12, 64), torch.nn.GELU(), torch.nn.Linear(64, 64), torch.nn.Linear(64, 1)
        )

    ours, stock = make(), DistributedDataParallel(make())
    torch_ext.parallelize(ours, policy())
    mine, theirs = _loop(rank, ours, 40), _loop(rank, stock, 40)
    if world == 2:
        # Halves are exact, and a sum of two terms has one order: all bits of the training must be DDP's.
        assert bits(list(ours.parameters())) == bits(list(stock.parameters())) and mine == theirs
    else:
        # DDP adds thirds in another order, which is a few fp32 ulps in a step; 40 steps magnify them.
        for a, b in zip(ours.parameters(), stock.parameters(), strict=True):
            assert torch.allclose(a, b, rtol=2.0**-13, atol=2.0**-17)
    assert sum(mine[-5:]) < 0.5 * sum(mine[:5])


@pytest.mark.parametrize("world", [2, 3])
def test_training_loop_equals_ddp(world: int) -> None:
    ranks.run(world, _against_ddp)
