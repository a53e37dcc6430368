"""Neighbouring buckets that travel as one message: agreed on by all ranks, and nothing but time depends on it."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
import ranks
import torch
from gradients import BF16, FP32, Given, bits, noise, on_all_ranks, policy
from ticking import Clock

import torch_ext
from torch_ext.comm.communicator import IN_FLIGHT
from torch_ext.parallel import bucket_exchange, bucket_joining, parallel_module

MILLISECOND = 1_000_000
SHAPES: list[Any] = [(300,), (5, 77), (300,), (1000,)] * 4  # each is a bucket by itself
CYCLES = 6  # the fourth is the first whose buckets can have been joined
WIRES: list[Any] = [
    pytest.param((BF16, BF16, BF16), {}, id="bf16"),
    pytest.param((BF16, BF16, BF16), {"bucket_size": 900}, id="two-to-a-bucket"),
    pytest.param((BF16, FP32, BF16), {}, id="wire-bf16"),
    pytest.param((BF16, BF16, "fp8"), {}, id="fp8"),
    pytest.param((BF16, FP32, "fp8"), {"grad_gather_dtype": "fp8"}, id="sums-fp8"),
]


def _plan(*numels: int) -> Any:
    """As much of a plan as is asked for: buckets in bf16, all in one buffer."""
    return SimpleNamespace(buckets=[SimpleNamespace(numel=n, grad_comm_dtype=BF16, buffer=0) for n in numels])


def _measured(cycles: list[list[int]], plan: Any, monkeypatch: pytest.MonkeyPatch) -> bucket_joining.BucketJoining:
    """cycles: of each, when its buckets were complete and when the last sum had come, in microseconds."""
    found = bucket_joining.BucketJoining(plan, True)
    for times in cycles:
        looks = iter(times)
        monkeypatch.setattr(
            bucket_joining, "time", SimpleNamespace(monotonic_ns=lambda looks=looks: next(looks) * 1000)
        )
        found.reset()
        for _ in plan.buckets:
            found.complete()
        found.ended()
    return found


def test_reports_have_mean_times_and_the_least_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    cycles = [[100, 1100, 1600], [0, 3000, 3200], [50, 2050, 2950]]  # tails of 500, 200 and 900
    found = _measured(cycles, _plan(128, 128), monkeypatch)
    found.learn([])
    found.learn([])
    assert found.words(False).tolist() == [0, 2000, 2533, 200, 0]
    assert found.words(True).tolist() == [0, 2000, 2533, 200, 1]


@pytest.mark.parametrize(
    ("ends", "last"), [([1, 2, 3], 300), ([1, 3], 500), ([2, 3], 300), ([3], 600)], ids=lambda value: str(value)
)
def test_a_tail_is_that_of_the_last_message(ends: list[int], last: int, monkeypatch: pytest.MonkeyPatch) -> None:
    told = []

    def coalesce(args: Any, _: Any, n: Any) -> None:
        told.append((args._obj.tail_bytes, [args._obj.tail[rank] for rank in range(2)], args._obj.ended[1]))
        n._obj.value = 0

    found = _measured([[0, 10, 20, 30]], _plan(50, 100, 150), monkeypatch)
    found.ends = frozenset(ends)
    monkeypatch.setattr(bucket_joining.library, "function", lambda *_: coalesce)
    found.learn([])
    found.learn([])
    found.learn([torch.tensor([0, 10, 20, 30, 7, 0]), torch.tensor([0, 11, 21, 31, 8, 1])])
    assert told == [(last, [7, 8], 31)]
    assert found.words(False).numel() == 0
    for _ in range(5):
        found.learn([])
    assert found.words(False).tolist() == [0] * 6, "of the cycles since"


def _tells(rank: int, world: int, strategy: str) -> None:
    chosen = policy(BF16, bucket_size=300, overlap_grad_reduce=True)
    engine = parallel_module.reducer_of(torch_ext.parallelize(Given(SHAPES, BF16), chosen, strategy=strategy))
    n = len(engine.plan.buckets)
    rows = torch.zeros(2, n + 2, dtype=torch.int64)
    assert engine.exchange.coalescing._measured(rows).sharded == (strategy != "no_shard")
    places = [engine.strategy._slots_needed(buckets) for buckets in (range(1), range(2), range(1, n), range(n))]
    assert places == [1, IN_FLIGHT // 2, IN_FLIGHT // 2, IN_FLIGHT], "a whole buffer is alone on its way"


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
def test_what_may_travel_together_depends_on_the_strategy(strategy: str) -> None:
    ranks.run(2, _tells, strategy)


def _parallel_model(dtypes: Any, strategy: str = "no_shard", joins: bool = True, **ddp: Any) -> tuple[Any, Any]:
    """A model with small buckets, which are joined all the same, and its engine."""
    bucket_exchange.BucketJoining = lambda plan, *_: bucket_joining.BucketJoining(plan, joins)
    options = {"bucket_size": 300, "overlap_grad_reduce": True, **ddp}
    chosen = policy(*dtypes, **options)
    model = torch_ext.parallelize(Given(SHAPES, BF16), chosen, strategy=strategy, find_unused_parameters=True)
    return model, parallel_module.reducer_of(model)


def _train(rank: int, each: int, dtypes: Any, *options: Any, **ddp: Any) -> tuple[list[list[bytes]], list[int]]:
    """The gradients of all cycles, those that this rank steps, and how many messages the buckets of each made."""
    bucket_joining.time = Clock(each)
    model, engine = _parallel_model(dtypes, *options, **ddp)
    found, messages = [], []
    for seed in range(CYCLES):
        messages.append(len(engine.exchange.coalescing.ends))
        model.zero_grad()
        grads: list[Any] = noise(seed, rank, SHAPES, BF16)
        grads[seed + rank] = None  # it does not come
        if seed % 2:
            with model.no_sync():
                model(noise(seed + 100, rank, SHAPES, BF16)).backward()
        model(grads).backward()
        found.append(bits([grad for p in model.parameters() if (grad := engine.grad(p)) is not None]))
        found.append(bits([engine.stats(list(model.parameters()))]) if engine.sharded else [])
        assert not len(engine.strategy.temporary)
    return found, messages


def _joined_and_not(rank: int, world: int, strategy: str, dtypes: Any, ddp: Any) -> None:
    alone, messages = _train(rank, MILLISECOND // 10, dtypes, strategy, False, **ddp)
    assert len(set(messages)) == 1
    joined, fewer = _train(rank, MILLISECOND // 10, dtypes, strategy, **ddp)
    assert fewer[0] == messages[0] and fewer[-1] <= messages[0] // 2
    assert joined == alone
    assert strategy != "no_shard" or on_all_ranks(joined) == [joined] * world


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(("dtypes", "ddp"), WIRES)
def test_bits_do_not_depend_on_what_is_joined(world: int, strategy: str, dtypes: Any, ddp: Any) -> None:
    if strategy != "no_shard":
        ddp = {key: value for key, value in ddp.items() if key != "grad_gather_dtype"}  # nobody gathers sums
    ranks.run(world, _joined_and_not, strategy, dtypes, ddp)


def _paces(rank: int, world: int, paces: list[int]) -> list[int]:
    return _train(rank, paces[rank], (BF16,))[1]


@pytest.mark.parametrize(
    ("paces", "joined"),
    [
        pytest.param([MILLISECOND // 10] * 2, True, id="done-at-once"),
        pytest.param([30 * MILLISECOND] * 2, False, id="a-long-backward"),
        pytest.param([20 * MILLISECOND, 30 * MILLISECOND], False, id="longer-on-one-rank"),
        pytest.param([MILLISECOND // 10, 30 * MILLISECOND], True, id="long-but-one-rank-saw-a-fast-wire"),
    ],
)
def test_buckets_are_joined_where_backward_is_done_first_or_the_wire_is_fast(paces: list[int], joined: bool) -> None:
    first, second = ranks.run(2, _paces, paces)
    assert first == second, "each cycle's messages are the same everywhere"
    assert (first[-1] < first[0]) == joined


def _follows(rank: int, world: int) -> list[int]:
    """Backward becomes slow, and quick again."""
    clock = bucket_joining.time = Clock(MILLISECOND // 10)
    model, engine = _parallel_model((BF16,))
    grads = [torch.ones(s, dtype=BF16) for s in SHAPES]
    messages = []
    for pace, cycles in ((MILLISECOND // 10, 8), (30 * MILLISECOND, 48), (MILLISECOND // 10, 100)):
        clock.each = pace
        for _ in range(cycles):
            model.zero_grad()
            model(grads).backward()
        messages.append(len(engine.exchange.coalescing.ends))
    return messages


def test_what_is_joined_follows_the_training() -> None:
    (quick, slow, again), other = ranks.run(2, _follows)
    assert other == [quick, slow, again]
    assert quick == again < slow


class _Broken(Exception):
    pass


def _raises(rank: int, world: int) -> None:
    """In the middle of joined buckets, on all ranks; then training goes on with the right sums."""
    bucket_joining.time = Clock(MILLISECOND // 10)
    model, engine = _parallel_model((BF16,))
    for seed in range(CYCLES):
        model.zero_grad()
        model(noise(seed, rank, SHAPES, BF16)).backward()
    assert len(engine.exchange.coalescing.ends) < 8

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
    bucket_joining.time = Clock(MILLISECOND // 10)
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
    assert "gradients of cycle 6, buckets 0 to " in message and "rank 1 did not respond" in message


def _by_default(rank: int, world: int) -> dict[str, bool]:
    """Whether a quick backward's buckets are joined."""
    found = {}
    for name, strategy, size in (
        ("default", 0, None),
        ("size given", 0, 262_144),
        ("optim", 1, None),
        ("optim_grads", 2, None),
        ("sharded, size given", 1, 262_144),
    ):
        bucket_joining.time = Clock(MILLISECOND // 10)
        shapes = [262_144] * 10
        chosen = policy(BF16, bucket_size=size, overlap_grad_reduce=True)
        model: Any = torch_ext.parallelize(Given(shapes, BF16), chosen, strategy=strategy)
        engine = parallel_module.reducer_of(model)
        for _ in range(CYCLES):
            model.zero_grad()
            model([torch.ones(s, dtype=BF16) for s in shapes]).backward()
        found[name] = len(engine.exchange.coalescing.ends) < len(engine.plan.buckets)
        assert len(engine.plan.buckets) == 10
    return found


def test_a_size_that_is_given_is_kept() -> None:
    expected = {
        "default": True,
        "size given": False,
        "optim": True,
        "optim_grads": True,
        "sharded, size given": False,
    }
    assert ranks.run(2, _by_default) == [expected] * 2
