"""Gradients and weights under optim and optim_grads: E3's table row by row, E8, and changes that must be noticed."""

import time
from typing import Any

import internals
import pytest
import ranks
import torch
from gradients import BF16, FP16, FP32, Given, noise, policy

import torch_ext
from torch_ext.comm.communicator import IN_FLIGHT
from torch_ext.parallel import parallel_module

SHAPES: list[Any] = [(3, 5), (130,), (7,), (2, 200)]


def _engine(model: Any) -> Any:
    return parallel_module.reducer_of(model)


def _parallel(strategy: str, *dtypes: Any, **ddp: Any) -> Any:
    chosen = policy(*dtypes, bucket_size=130, **ddp)
    return torch_ext.parallelize(Given(SHAPES, dtypes[0]), chosen, strategy=strategy, find_unused_parameters=True)


def _mean(step: int, world: int, param: int, dtype: torch.dtype, absent: int | None = None) -> torch.Tensor:
    """Returns the mean of the ranks' noise for a parameter; `absent`: a rank that contributes nothing."""
    each = [noise(step, r, SHAPES, dtype)[param].double() for r in range(world) if r != absent]
    return torch.stack(each).sum(0).reshape(-1) / world


def _life_of_optim(rank: int, world: int, wire: Any) -> None:
    """E3 and E5 under optim: where gradients are after each backward, and which numbers they have."""
    model = _parallel("optim", BF16, FP32, wire)
    engine = _engine(model)
    for step in range(3):
        grads: list[Any] = noise(step, rank, SHAPES, BF16)
        grads[1] = None if rank == 1 else grads[1]
        grads[2] = None
        with model.no_sync():
            model(grads).backward()
        assert engine.wire_bytes == 0 or step, "E5: nothing travels under no_sync"
        model(grads).backward()
        assert len(engine.strategy.temporary) == 0, "E3: a wire bucket is always freed"
        flats = {flat.untyped_storage().data_ptr() for flat in engine.strategy.buffers.flats}
        for i, p in enumerate(model.parameters()):
            if i == 2:
                assert p.grad is None and engine.grad(p) is None, "E3: unused everywhere: untouched"
                continue
            assert p.grad.dtype == FP32 and p.grad.untyped_storage().data_ptr() in flats
            own, local = engine.grad(p), engine.local(p)
            part = 2 * _mean(step, world, i, BF16, 1 if i == 1 else None)[local.offset : local.offset + own.numel()]
            assert torch.allclose(own.double(), part, rtol=2**-7 if wire == BF16 else 1e-3, atol=1e-6)
        model.zero_grad(set_to_none=step % 2 == 0)


def _life_of_optim_grads(rank: int, world: int, wire: Any) -> None:
    """E3 and E8 under optim_grads: every backward reduces into the shard, and `.grad` stays None."""
    model = _parallel("optim_grads", BF16, FP32, wire)
    engine = _engine(model)
    for step in range(3):
        grads: list[Any] = noise(step, rank, SHAPES, BF16)
        grads[1] = None if rank == 1 else grads[1]
        grads[2] = None
        for microbatch in range(2):
            with model.no_sync():
                model(grads).backward()
            assert world == 1 or engine.wire_bytes > 0, "E8: gradients are reduced in every backward, no_sync or not"
            assert all(p.grad is None for p in model.parameters()), "E3: the shard has it"
            assert len(engine.strategy.temporary) == 0 and not engine.strategy._unsent_grads
            for i, p in enumerate(model.parameters()):
                own, local = engine.grad(p), engine.local(p)
                if i == 2:
                    assert own is None
                    continue
                mean = (microbatch + 1) * _mean(step, world, i, BF16, 1 if i == 1 else None)
                part = mean[local.offset : local.offset + own.numel()]
                assert own.dtype == FP32
                assert torch.allclose(own.double(), part, rtol=2**-7 if wire == BF16 else 1e-3, atol=1e-6)
        model.zero_grad()
        assert all(engine.grad(p) is None for p in model.parameters())


def _lives(rank: int, world: int) -> None:
    for wire in (None, BF16, FP16):
        _life_of_optim(rank, world, wire)
        _life_of_optim_grads(rank, world, wire)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_e3_gradient_life_cycle(world: int) -> None:
    ranks.run(world, _lives)


def _life_of_no_shard(rank: int, world: int, wire: torch.dtype | None) -> None:
    """E3 under no_shard: gradients are views of flat buffers, and unused parameters have none."""
    shapes = [(3, 5), (130,), (7,), (2, 2)]
    model = Given(shapes, BF16)
    torch_ext.parallelize(model, policy(BF16, FP32, wire, bucket_size=130), find_unused_parameters=True)
    engine = _engine(model)
    assert all(p.grad is None for p in model.parameters()), "E11: nothing is there before the first gradient"
    for step in range(3):
        grads: list[Any] = noise(step, rank, shapes, BF16)
        grads[1] = None if rank == 1 else grads[1]  # unused on one rank
        grads[2] = None  # unused everywhere
        model(grads).backward()
        assert len(engine.strategy.temporary) == 0, "E3: a wire bucket is always freed"
        buffers = {f.untyped_storage().data_ptr() for f in engine.strategy.buffers.flats}
        for name, p in model.named_parameters():
            if name == "p2":
                assert p.grad is None, "E3: unused everywhere: untouched"
            else:
                assert p.grad.dtype == FP32 and p.grad.untyped_storage().data_ptr() in buffers
        expected = (
            torch.stack([noise(step, r, shapes, BF16)[1].double() for r in range(world) if r != 1]).sum(0) / world
        )
        assert torch.allclose(model.p1.grad.double(), expected, rtol=2**-8, atol=0), "E3: absent counts as zero"
        model.zero_grad(set_to_none=step % 2 == 0)
        if step % 2:
            assert not model.p0.grad.any()
            model.p1.grad = None


@pytest.mark.parametrize("wire", [None, BF16, FP16], ids=["in place", "wire bf16", "wire fp16"])
@pytest.mark.parametrize("world", [1, 3])
def test_e3_gradient_life_cycle_of_no_shard(wire: torch.dtype | None, world: int) -> None:
    ranks.run(world, _life_of_no_shard, wire)


def _equal_dtypes(rank: int, world: int) -> None:
    """E1: with equal dtypes nothing may be allocated a second time."""
    model = _parallel("optim", FP32)
    taken: list[Any] = []
    engine = _engine(model)
    engine.strategy.temporary.take = lambda *a, **k: taken.append(a)
    model(noise(0, rank, SHAPES)).backward()
    assert not taken
    optimizer = torch_ext.AdamW(model.parameters())
    optimizer.step()
    assert all("master_param" not in optimizer.state[p] for p in model.parameters())


def test_e1_equal_dtypes_allocate_nothing_extra() -> None:
    ranks.run(2, _equal_dtypes)


def _sizes(rank: int, world: int, strategy: str) -> dict[str, int]:
    """Returns this rank's bytes of states and gradients, and how many elements it steps."""
    model = torch_ext.parallelize(Given([(4096,), (1000,)], BF16), policy(BF16), strategy=strategy)
    optimizer = torch_ext.AdamW(model.parameters())
    model(noise(0, rank, [(4096,), (1000,)], BF16)).backward()
    optimizer.step()
    state = [t for p in model.parameters() for t in optimizer.state[p].values() if t.numel() > 1]
    store = _engine(model).strategy
    grads = store.shards if strategy == "optim_grads" else store.buffers.flats
    return {
        "state": sum(t.nbytes for t in state),
        "grads": sum(t.nbytes for t in grads),
        "elements": sum(_engine(model).local(p).weight.numel() for p in model.parameters()),
    }


@pytest.mark.parametrize("strategy", ["optim", "optim_grads"])
def test_e2_what_is_sharded(strategy: str) -> None:
    numel, padded = 5096, 5376  # 128 * 3 * 14
    by_rank = ranks.run(3, _sizes, strategy)
    assert sum(sizes["elements"] for sizes in by_rank) == numel, "every element is stepped by one rank"
    for sizes in by_rank:
        assert sizes["state"] == 8 * sizes["elements"], "bf16 moments and fp32 masters of this rank's part"
        assert sizes["grads"] == 2 * (padded // 3 if strategy == "optim_grads" else padded)


def _written(rank: int, world: int, strategy: str) -> None:
    """The norm's statistics that come with the reduction must be those of the gradients; a write drops them."""
    model = _parallel(strategy, BF16, FP32)
    engine = _engine(model)
    params = [p for i, p in enumerate(model.parameters()) if i != 2]
    optimizer = torch_ext.AdamW(params)
    grads: list[Any] = noise(0, rank, SHAPES, BF16)
    grads[2] = None
    model(grads).backward()
    assert engine.stats(params) is not None and engine.stats(params[:2]) is None
    known = torch_ext.clip_grad_norm_(optimizer, 1.0)
    with torch.no_grad():
        engine.grad(params[0]).mul_(1.0)
    assert engine.stats(params) is None
    optimizer.zero_grad()
    model(grads).backward()
    engine.strategy.stats += 1  # if they were used, the norm would differ
    with torch.no_grad():
        engine.grad(params[0]).mul_(1.0)
    assert torch.equal(known, torch_ext.clip_grad_norm_(optimizer, 1.0))
    whole = torch.cat([_mean(0, world, i, BF16) for i in (0, 1, 3)])
    assert torch.allclose(known.double(), whole.norm(), rtol=1e-5)


@pytest.mark.parametrize("strategy", ["optim", "optim_grads"])
def test_norms_that_come_with_the_reduction(strategy: str) -> None:
    ranks.run(2, _written, strategy)


def _weights(rank: int, world: int, strategy: str) -> None:
    """Weights must be views of flat buffers; a moved one is named; at the end each has its own memory."""
    model = _parallel(strategy, BF16)
    engine = _engine(model)
    optimizer = torch_ext.AdamW(model.parameters(), lr=0.1)
    for moved in (False, True):
        model(noise(0, rank, SHAPES, BF16)).backward()
        flats = {flat.untyped_storage().data_ptr() for flat in engine.exchange.weights.flats}
        assert all(p.untyped_storage().data_ptr() in flats for p in model.parameters())
        if moved:
            model.p1.data = model.p1.data.clone()
            with pytest.raises(RuntimeError, match=r"'p1' left the flat buffer .*p\.copy_"):
                optimizer.step()
        else:
            optimizer.step()
        optimizer.zero_grad()
    torch_ext.parallelize(Given(SHAPES), policy())  # another model, to go on with
    engine.close()
    assert all(p.untyped_storage().data_ptr() not in flats for p in model.parameters()), "memory of their own again"


@pytest.mark.parametrize("strategy", ["optim", "optim_grads"])
def test_weights_are_views_and_a_parameter_that_moved_is_named(strategy: str) -> None:
    ranks.run(2, _weights, strategy)


def _channels_last(rank: int, world: int, strategy: str) -> list[Any]:
    """Trains a channels_last convolution, whose weight must keep its memory format; returns the weight."""
    torch.manual_seed(1)
    convolution = torch.nn.Conv2d(5, 7, 3).to(memory_format=torch.channels_last)
    model = torch_ext.parallelize(torch.nn.Sequential(convolution), policy(), strategy=strategy)
    optimizer = torch_ext.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        model(torch.randn(2, 5, 6, 6)).square().mean().backward()
        torch_ext.clip_grad_norm_(optimizer, 0.1)
        optimizer.step()
        optimizer.zero_grad()
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    return model[0].weight.detach().tolist()


def test_memory_formats_survive() -> None:
    found = [ranks.run(2, _channels_last, strategy) for strategy in ("no_shard", "optim", "optim_grads")]
    assert all(answer == found[0][0] for answers in found for answer in answers)


# -- the order of gradients is recorded ------------------------------------------------------------------------------


class InOrder(torch.nn.Module):
    """A chain whose gradients come in a given order, with values that do not depend on it."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(torch.ones(200, dtype=dtype)) for _ in range(5))

    def forward(self, order: list[int], grads: list[torch.Tensor]) -> torch.Tensor:
        x = torch.ones((), dtype=grads[0].dtype)
        for i in reversed(order):  # the last one in the chain gets its gradient first
            x = x + (self.weights[i] * grads[i]).sum()
        return x


def _learns(rank: int, world: int, strategy: str) -> Any:
    """The ranks have different orders; rank 0's must be used by all, and sums must not depend on it."""
    orders = [[2, 4, 0, 3, 1], [4, 3, 2, 1, 0]]
    shapes = [(200,)] * 5
    model = torch_ext.parallelize(InOrder(BF16), policy(BF16, FP32, bucket_size=1), strategy=strategy)
    engine = _engine(model)
    planned = [p.bucket for p in engine.plan.parameters]
    optimizer = torch_ext.AdamW(model.parameters(), lr=0.1, policy=policy(BF16, FP32))
    came: list[int] = []
    for i, p in enumerate(model.parameters()):
        p.register_post_accumulate_grad_hook(lambda _, i=i: came.append(i))
    for step in range(3):
        came.clear()
        model(orders[rank], noise(step, rank, shapes, BF16)).backward()
        for i, p in enumerate(model.parameters()):
            own, local = engine.grad(p), engine.local(p)
            part = _mean_of(step, world, shapes, i)[local.offset : local.offset + own.numel()]
            assert torch.allclose(own.reshape(-1).double(), part, rtol=1e-5, atol=1e-6)
        torch_ext.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    learnt = [p.bucket for p in engine.plan.parameters]
    assert planned == [4, 3, 2, 1, 0]
    return came, learnt, engine.plan.fingerprint, [p.detach().tolist() for p in model.parameters()]


def _mean_of(step: int, world: int, shapes: list[Any], param: int) -> torch.Tensor:
    return torch.stack([noise(step, r, shapes, BF16)[param].double() for r in range(world)]).sum(0) / world


def test_buckets_follow_the_order_in_which_gradients_came_on_rank_0() -> None:
    weights = []
    for strategy in ("no_shard", "optim", "optim_grads"):
        first, second = ranks.run(2, _learns, strategy)
        assert first[1:] == second[1:] and first[0] != second[0]
        if strategy == "optim_grads":  # it would have to keep all gradients at a time
            assert first[1] == [4, 3, 2, 1, 0]
        else:
            assert [first[1][i] for i in first[0]] == [0, 1, 2, 3, 4]
        weights.append(first[3])
    assert weights[1] == weights[2]


# -- memory of buckets in flight -------------------------------------------------------------------------------------


def _slow(rank: int, world: int, strategy: str, joined: bool) -> int:
    """Returns the largest number of buckets in the wire's dtype at a time, when sums take longer than backward."""
    if joined:
        internals.join_pairs()
    model = torch_ext.parallelize(
        Given([(200,)] * 16, BF16), policy(BF16, FP32, BF16, bucket_size=1), strategy=strategy
    )
    temporary = _engine(model).strategy.temporary
    most = 0

    def slowly() -> None:
        nonlocal most
        time.sleep(0.01)
        most = max(most, len(temporary))

    internals.before_sums(slowly)
    for step in range(2):
        model(noise(step, rank, [(200,)] * 16, BF16)).backward()
        temporary = _engine(model).strategy.temporary
        model.zero_grad()
    assert len(temporary) == 0
    return most


@pytest.mark.parametrize("joined", [False, True], ids=["one by one", "joined"])
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
def test_buckets_on_their_way_are_bounded(strategy: str, joined: bool) -> None:
    for most in ranks.run(2, _slow, strategy, joined):
        assert most == IN_FLIGHT // 2 if joined else 1 < most <= IN_FLIGHT
