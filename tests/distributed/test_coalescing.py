"""Neighbouring buckets may travel as one message. The link's speed decides which, the same on all ranks, and only the
time may depend on it: no bit of a gradient."""

import time
from typing import Any

import pytest
import ranks
import torch
from gradients import BF16, FP32, Given, bits, noise, on_all_ranks, policy
from torch import distributed as dist

import torch_ext
from torch_ext.comm import factory, link
from torch_ext.comm.communicator import IN_FLIGHT
from torch_ext.parallel import message_plan, parallel_module

SHAPES: list[Any] = [(300,), (5, 77), (300,), (1000,)] * 4  # each is a bucket by itself
CYCLES = 3
WIRES: list[Any] = [
    pytest.param((BF16, BF16, BF16), {}, id="bf16"),
    pytest.param((BF16, BF16, BF16), {"bucket_size": 900}, id="two-to-a-bucket"),
    pytest.param((BF16, FP32, BF16), {}, id="wire-bf16"),
    pytest.param((BF16, BF16, "fp8"), {}, id="fp8"),
    pytest.param((BF16, FP32, "fp8"), {"grad_gather_dtype": "fp8"}, id="sums-fp8"),
]


def _checks_slots(rank: int, world: int, strategy: str) -> None:
    """The slots for messages in flight must count a joined message by its size."""
    chosen = policy(BF16, bucket_size=300, overlap_grad_reduce=True)
    engine = parallel_module.reducer_of(torch_ext.parallelize(Given(SHAPES, BF16), chosen, strategy=strategy))
    n = len(engine.plan.buckets)
    places = [engine.strategy._slots_needed(buckets) for buckets in (range(1), range(2), range(1, n), range(n))]
    assert places == [1, IN_FLIGHT // 2, IN_FLIGHT // 2, IN_FLIGHT], "a whole buffer is alone on its way"


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
def test_joined_buckets_take_more_slots(strategy: str) -> None:
    ranks.run(2, _checks_slots, strategy)


def _join(n: int) -> None:
    """Makes buckets of one flat buffer travel n at a time, whatever the link's speed."""

    def decide(buckets: Any, *_: Any) -> message_plan.Messages:
        return message_plan.Messages(ends=(*range(n, len(buckets), n), len(buckets)))

    message_plan.decide = decide


def _parallel_model(dtypes: Any, strategy: str = "no_shard", **ddp: Any) -> tuple[Any, Any]:
    """Returns a model with small buckets, and its reducer."""
    options = {"bucket_size": 300, "overlap_grad_reduce": True, **ddp}
    chosen = policy(*dtypes, **options)
    model = torch_ext.parallelize(Given(SHAPES, BF16), chosen, strategy=strategy, find_unused_parameters=True)
    return model, parallel_module.reducer_of(model)


def _train(rank: int, dtypes: Any, strategy: str, **ddp: Any) -> tuple[list[list[bytes]], int]:
    """Returns the gradients of all cycles, those that this rank steps, and the number of messages."""
    model, engine = _parallel_model(dtypes, strategy, **ddp)
    found = []
    for seed in range(CYCLES):
        model.zero_grad()
        grads: list[Any] = noise(seed, rank, SHAPES, BF16)
        grads[seed + rank] = None  # this gradient does not come
        if seed % 2:
            with model.no_sync():
                model(noise(seed + 100, rank, SHAPES, BF16)).backward()
        model(grads).backward()
        found.append(bits([grad for p in model.parameters() if (grad := engine.grad(p)) is not None]))
        found.append(bits([engine.stats(list(model.parameters()))]) if engine.sharded else [])
        assert not len(engine.strategy.temporary)
    return found, len(engine.plan.messages.ends)


def _joined_and_not(rank: int, world: int, strategy: str, dtypes: Any, ddp: Any) -> None:
    """Joining 2 or 5 buckets must leave the bits of separate buckets."""
    alone, messages = _train(rank, dtypes, strategy, **ddp)
    for n in (2, 5):
        _join(n)
        joined, fewer = _train(rank, dtypes, strategy, **ddp)
        assert fewer == -(-messages // n)
        assert joined == alone
    assert strategy != "no_shard" or on_all_ranks(joined) == [joined] * world


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(("dtypes", "ddp"), WIRES)
def test_bits_do_not_depend_on_what_is_joined(world: int, strategy: str, dtypes: Any, ddp: Any) -> None:
    if strategy != "no_shard":
        ddp = {key: value for key, value in ddp.items() if key != "grad_gather_dtype"}  # sums are not gathered
    ranks.run(world, _joined_and_not, strategy, dtypes, ddp)


class _Broken(Exception):
    pass


def _raises(rank: int, world: int) -> None:
    """Raises in the middle of joined buckets on all ranks. Training must then go on with the right sums."""
    _join(4)
    model, _ = _parallel_model((BF16,))
    for seed in range(CYCLES):
        model.zero_grad()
        model(noise(seed, rank, SHAPES, BF16)).backward()

    def broken(grad: torch.Tensor) -> None:
        raise _Broken

    for at in (3, 10):
        hook = list(model.parameters())[at].register_hook(broken)
        with pytest.raises(_Broken):
            model(noise(7, rank, SHAPES, BF16)).backward()
        hook.remove()
        model.zero_grad()
        model([torch.full(s, 1.0 + rank, dtype=BF16) for s in SHAPES]).backward()
        assert all(p.grad.unique().tolist() == [1.5] for p in model.parameters())


def test_a_backward_that_raises_among_joined_buckets_is_survived() -> None:
    ranks.run(2, _raises)


def _late(rank: int, world: int) -> str:
    """Rank 1 comes later than the time-out; returns rank 0's error."""
    _join(4)
    model, _ = _parallel_model((BF16,))
    for seed in range(CYCLES):
        model(noise(seed, rank, SHAPES, BF16)).backward()
    if rank == 1:
        time.sleep(4)
        return ""
    with pytest.raises(RuntimeError) as caught:
        model(noise(7, rank, SHAPES, BF16)).backward()
    return str(caught.value)


def test_a_timeout_names_the_joined_buckets() -> None:
    message = ranks.run(2, _late, timeout=2.0)[0]
    assert "gradients of cycle 3, buckets 0 to 3 " in message and "rank 1 did not respond" in message


# -- what the link's speed decides -----------------------------------------------------------------------------------

LARGE = [262_144] * 10


def _messages(strategy: str = "no_shard", **ddp: Any) -> message_plan.Messages:
    """Returns the messages that plan_buckets shows for two ranks."""
    chosen = policy(BF16, overlap_grad_reduce=True, data_parallel_sharding_strategy=strategy, **ddp)
    return torch_ext.plan_buckets(LARGE, chosen, 2).messages


def test_plan_buckets_says_what_travels_together() -> None:
    assert _messages() == (None, False, tuple(range(1, 11))), "the link is not known"
    assert _messages(link_gbps=8) == (8, False, (5, 10))
    assert _messages(link_gbps=0.5) == (0.5, True, tuple(range(1, 11)))
    assert _messages(link_gbps=0.5, grad_comm_compression="off") == (0.5, False, tuple(range(1, 11)))
    assert _messages(link_gbps=1000) == (1000, False, (10,)), "a small buffer at once"
    assert _messages("optim", link_gbps=8).ends == (10,), "no sum is sent back: all of it takes half as long"
    assert _messages(link_gbps=8, bucket_size=262_144).ends == tuple(range(1, 11)), "a size that is given is kept"
    shown = str(torch_ext.plan_buckets(LARGE, policy(BF16, link_gbps=8), 2))
    assert shown.endswith("link of 8 Gbit/s: buckets 0 to 4, 5 to 9 are sent as one message each")
    shown = str(torch_ext.plan_buckets(LARGE, policy(BF16, link_gbps=0.5), 2))
    assert shown.endswith("link of 0.5 Gbit/s: each bucket is a message, compressed")
    assert torch_ext.plan_buckets(LARGE, policy(BF16, link_gbps=8), 1).messages.link_gbps is None, "one rank"


def test_a_link_that_is_none_is_refused() -> None:
    for illegal in (0, -1, float("inf"), float("nan"), "fast", True):
        with pytest.raises(ValueError, match=r"link_gbps.*legal: none, \(0, inf\)"):
            policy(BF16, link_gbps=illegal)


def _as_planned(rank: int, world: int) -> None:
    """A given speed must not be measured. A measured one must be in the plan, also after a new layout."""
    measured = []

    def measure(*_: Any) -> float:
        measured.append(1)
        return 8.0

    message_plan.link.measure = measure
    for strategy, options, asks in (
        ("no_shard", {"link_gbps": 8}, False),
        ("no_shard", {}, True),
        ("optim", {}, True),
        ("optim_grads", {}, True),
        ("optim", {"bucket_size": 262_144, "grad_comm_compression": "off"}, False),
    ):
        measured.clear()
        chosen = policy(BF16, overlap_grad_reduce=True, **options)
        model: Any = torch_ext.parallelize(Given(LARGE, BF16), chosen, strategy=strategy)
        engine = parallel_module.reducer_of(model)
        assert bool(measured) == asks
        for _ in range(2):
            expected = None if "bucket_size" in options else 8.0
            assert engine.plan.messages.link_gbps == expected
            assert len(engine.plan.messages.ends) == (10 if expected is None else 2 if strategy == "no_shard" else 1)
            model([torch.ones(s, dtype=BF16) for s in LARGE]).backward()
            model.zero_grad()


def test_what_is_given_or_measured_is_in_the_plan() -> None:
    ranks.run(2, _as_planned)


def _measures(rank: int, world: int) -> float | None:
    """Measures the link, and checks how many bytes that takes."""
    exchange = factory.make_communicator(dist.group.WORLD, torch.device("cpu"))
    before = exchange.bytes_sent
    found = link.measure(exchange, 3, "a test")
    assert 24 * 2**20 <= exchange.bytes_sent - before < 25 * 2**20
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_every_rank_measures_the_same(world: int) -> None:
    first, *others = ranks.run(world, _measures)
    assert first > 0 and others == [first] * (world - 1)


def _differs(rank: int, world: int) -> str:
    """Returns the error of ranks that are given different speeds."""
    with pytest.raises(RuntimeError) as raised:
        torch_ext.parallelize(Given(SHAPES, BF16), policy(BF16, link_gbps=1 + rank))
    return str(raised.value)


def test_ranks_agree_on_what_is_given() -> None:
    for message in ranks.run(2, _differs):
        assert "link of 2.0 Gbit/s" in message and "link of 1.0 Gbit/s" in message


def _is_lost(rank: int, world: int) -> str:
    """Rank 1 does not measure; returns rank 0's error."""
    exchange = factory.make_communicator(dist.group.WORLD, torch.device("cpu"))
    if rank == 1:
        time.sleep(4)
        return ""
    with pytest.raises(RuntimeError) as raised:
        link.measure(exchange, 3, "a test")
    return str(raised.value)


def test_a_rank_that_does_not_measure_is_named() -> None:
    message = ranks.run(2, _is_lost, timeout=2.0)[0]
    assert "a test: measuring the link" in message and "rank 1 did not respond" in message
