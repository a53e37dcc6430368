"""Lossless compression of bf16 messages, on slow links or on request: about 3/4 of the bytes, and the same bits."""

import math
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from gradients import BF16, FP32, Given, bits, noise, on_all_ranks, policy
from torch.nn.parallel import DistributedDataParallel

import torch_ext
from torch_ext.comm import communicator, compression, factory, gloo, gloo_p2p, link
from torch_ext.comm.wire import WireBuffer
from torch_ext.parallel import memory_plan
from torch_ext.parallel.strategies.table import strategies as strategy_names

# Several buckets whose parts are long enough to be compressed, and one whose part is not.
SHAPES: list[Any] = [(256, 128), (128, 384), (96, 320), (3, 128), (192, 128)]
BUCKET = 30_000
PLAIN, ALWAYS, AUTO = "off", "on", "auto"


def _disordered(seed: int, rank: int) -> list[torch.Tensor]:
    """Returns gradients with values of very different sizes next to each other, which do not compress."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    sizes = [torch.randint(-60, 60, shape, generator=generator) for shape in SHAPES]
    return [torch.ldexp(torch.randn(s.shape, generator=generator), s).to(BF16) for s in sizes]


def _ordinary(seed: int, rank: int) -> list[torch.Tensor]:
    """Returns gradients of ordinary sizes, with a row of zeros."""
    grads = noise(seed, rank, SHAPES, BF16)
    grads[0][17].zero_()
    return grads


GRADIENTS = {"ordinary": _ordinary, "disordered": _disordered}


def _steps(rank: int, strategy: str, kind: str, compressed: str, dtypes: Any) -> tuple[Any, list[int]]:
    """Returns the weights after each of three steps, and the bytes that each sent."""
    chosen = policy(*dtypes, bucket_size=BUCKET, grad_comm_compression=compressed)
    model: Any = torch_ext.parallelize(Given(SHAPES, BF16), chosen, strategy=strategy)
    optimizer = torch_ext.AdamW(model.parameters(), policy=chosen)
    found, sent = [], []
    for seed in range(3):
        model(GRADIENTS[kind](seed, rank)).backward()
        optimizer.step()
        sent.append(model.wire_bytes())
        optimizer.zero_grad()
        whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
        found.append(bits(whole))
    return found, sent


def _compared(rank: int, world: int, strategy: str, kind: str, dtypes: Any) -> Any:
    """Compression must not change a bit. Returns the bytes of each step without and with it."""
    plain, plainly = _steps(rank, strategy, kind, PLAIN, dtypes)
    found, sent = _steps(rank, strategy, kind, ALWAYS, dtypes)
    assert found == plain
    assert on_all_ranks(found) == [found] * world
    return plainly, sent


WIRES: list[Any] = [
    pytest.param((BF16, BF16, BF16), id="bf16"),
    pytest.param((BF16, FP32, BF16), id="wire-bf16"),
    pytest.param((BF16, BF16, "fp8"), id="sums-bf16"),
]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("dtypes", WIRES)
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
def test_the_bits_are_the_same_and_bytes_are_fewer(strategy: str, dtypes: Any, world: int) -> None:
    for plain, sent in ranks.run(world, _compared, strategy, "ordinary", dtypes):
        coded = dtypes[2] != BF16
        trades = coded and world == 2 and strategy == "no_shard"  # with two ranks no sum in bf16 is sent
        few = 1.0 if trades else 0.92 if coded else 0.78
        assert all(few - 0.09 < s / p <= few for s, p in zip(sent, plain, strict=True)), (plain, sent)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
def test_what_is_too_disordered_travels_as_it_is(strategy: str, world: int) -> None:
    for plain, sent in ranks.run(world, _compared, strategy, "disordered", (BF16, BF16, BF16)):
        # Gathered weights compress; gradients do not.
        assert all(s > 0.85 * p for s, p in zip(sent, plain, strict=True)), (plain, sent)
        if strategy == "no_shard":
            assert all(0 <= s - p < p / 1000 for s, p in zip(sent, plain, strict=True)), (plain, sent)


def test_shards_of_fsdp2_are_compressed_where_one_asks_for_it() -> None:
    for kind in GRADIENTS:
        for plain, sent in ranks.run(2, _compared, "optim_grads_params", kind, (BF16, BF16, BF16)):
            assert max(sent) < 0.95 * min(plain) if kind == "ordinary" else sent[-1] < 1.001 * plain[-1]


def _bytes_of_a_step(rank: int, _world: int) -> tuple[int, int, list[int]]:
    """Returns a step's bytes without and with compression, and half of each bucket's elements."""
    _, plain = _steps(rank, "no_shard", "ordinary", PLAIN, (BF16,))
    _, sent = _steps(rank, "no_shard", "ordinary", ALWAYS, (BF16,))
    plan = torch_ext.plan_buckets(Given(SHAPES, BF16).named_parameters(), policy(BF16, bucket_size=BUCKET), 2)
    return plain[-1], sent[-1], [bucket.numel // 2 for bucket in plan.buckets]


def test_wire_bytes_are_those_of_the_messages() -> None:
    """With two ranks each sends half of every bucket, and half of its sum back."""
    for plain, sent, halves in ranks.run(2, _bytes_of_a_step):
        sizes = [compression.size(n, BF16) or 2 * n for n in halves]
        assert plain - sent == 2 * (sum(2 * n for n in halves) - sum(sizes)) > 0


def _without() -> None:
    """Makes the communicator unable to compress, as those of GPUs are."""
    gloo.GlooCommunicator.can_compress = property(lambda self: False, lambda self, value: None)  # type: ignore[assignment]


# -- slow links ------------------------------------------------------------------------------------------------------


def _decided(rank: int, world: int, strategy: str, setting: str, link_gbps: float | None) -> bool:
    """Returns whether three steps were compressed, after checking that the bits are the uncompressed ones."""
    sent, found = {}, {}
    for compressed in (PLAIN, setting):
        chosen = policy(BF16, bucket_size=BUCKET, grad_comm_compression=compressed, link_gbps=link_gbps)
        model: Any = torch_ext.parallelize(Given(SHAPES, BF16), chosen, strategy=strategy)
        optimizer = torch_ext.AdamW(model.parameters(), policy=chosen)
        for seed in range(3):
            model(_ordinary(seed, rank)).backward()
            optimizer.step()
            sent[compressed] = model.wire_bytes()
            optimizer.zero_grad()
        whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
        found[compressed] = bits(whole)
    assert found[setting] == found[PLAIN]
    return bool(sent[setting] < 0.95 * sent[PLAIN])


@pytest.mark.parametrize("strategy", strategy_names())
@pytest.mark.parametrize(
    ("setting", "link_gbps", "compressed"),
    [(AUTO, 2.4, True), (AUTO, 2.5, False), (PLAIN, 0.1, False), (ALWAYS, 1000, True)],
)
def test_a_link_that_is_given_decides(strategy: str, setting: str, link_gbps: float, compressed: bool) -> None:
    assert ranks.run(2, _decided, strategy, setting, link_gbps) == [compressed] * 2


def _measured(_rank: int, _world: int, gbps: float) -> bool:
    """Returns whether steps were compressed at a measured speed."""
    link.measure = lambda *_: gbps
    return _decided(_rank, _world, "no_shard", AUTO, None)


def test_a_link_that_is_measured_decides() -> None:
    assert ranks.run(2, _measured, 1.0) == [True] * 2
    assert ranks.run(2, _measured, 10.0) == [False] * 2


def _elsewhere(rank: int, world: int) -> bool:
    """Returns whether steps were compressed where the communicator cannot compress."""
    _without()
    return _decided(rank, world, "no_shard", AUTO, 0.5)


def test_what_cannot_be_compressed_is_sent_as_it_is_on_a_slow_link() -> None:
    assert ranks.run(2, _elsewhere) == [False] * 2


# -- DDP's hook, gathers, damage, refusals ---------------------------------------------------------------------------


def _hooked(rank: int, world: int, kind: str) -> None:
    """DDP's hook must give the same gradients with and without compression, in fewer bytes if they compress."""
    found = []
    for compressed in (PLAIN, ALWAYS):
        ddp = DistributedDataParallel(Given(SHAPES, BF16))
        hook = torch_ext.register_comm_hook(ddp, policy(BF16, grad_comm_compression=compressed))
        for seed in range(2):
            ddp.zero_grad()
            ddp(GRADIENTS[kind](seed, rank)).backward()
        found.append((bits([p.grad for p in ddp.parameters()]), hook.wire_bytes()))
    assert found[0][0] == found[1][0]
    assert (found[1][1] < 0.8 * found[0][1]) == (kind == "ordinary")


@pytest.mark.parametrize("kind", GRADIENTS)
def test_the_hook_of_ddp_compresses_where_one_asks_for_it(kind: str) -> None:
    ranks.run(2, _hooked, kind)


def _gathers(_rank: int, _world: int) -> list[int]:
    """Starts 10 all-gathers and checks their results. Returns how many were in flight after each start."""
    exchange: Any = factory.make_communicator(dist.group.WORLD, torch.device("cpu"))
    exchange.compresses = True
    started, under_way = [], []
    values = [torch.full((2 * 8192,), float(exchange.rank + 2 * i), dtype=BF16) for i in range(10)]
    for i, value in enumerate(values):
        started.append(
            exchange.all_gather_into_buffer(WireBuffer.of(value), tag=communicator.tag(3, 1, i), label=f"gather {i}")
        )
        under_way.append(sum(bool(one.recvs) for one in started))
    for one in started:
        one.result()
    for i, value in enumerate(values):
        assert value.view(2, -1).unique(dim=1).tolist() == [[2.0 * i], [2.0 * i + 1]]
    return under_way


def test_memory_of_gathers_is_bounded() -> None:
    for under_way in ranks.run(2, _gathers):
        assert max(under_way) < communicator.IN_FLIGHT


def _damaged(rank: int, _world: int) -> None:
    """Rank 1 sends a damaged message."""
    if rank == 1:
        compress = compression.compress

        def damaged(values: torch.Tensor, message: torch.Tensor) -> int:
            rest = compress(values, message)
            message[0] += 1  # a wrong number of escapes
            return rest

        gloo_p2p.compression.compress = damaged
    model: Any = torch_ext.parallelize(Given(SHAPES, BF16), policy(BF16, grad_comm_compression=ALWAYS))
    model(_ordinary(0, rank)).backward()


def test_a_damaged_message_is_an_error_that_names_bucket_and_rank() -> None:
    first, _ = ranks.outcomes(2, _damaged)
    assert isinstance(first, ranks.Raised)
    assert "bucket" in first.message and "rank 1" in first.message and "tx_compress" in first.message


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only gloo's messages are compressed. Elsewhere "on" is rejected by name, and the other values do nothing."""
    with pytest.raises(ValueError, match=r"grad_comm_compression='on'.*gloo.*'auto' and 'off'"):
        compression.refuse(policy(BF16, grad_comm_compression=ALWAYS), False)
    for compressed in (PLAIN, AUTO):
        compression.refuse(policy(BF16, grad_comm_compression=compressed), False)
    for illegal in (-1.0, math.nan, "fast", True):
        with pytest.raises(ValueError, match=r"grad_comm_compression.*auto, off, on"):
            policy(BF16, grad_comm_compression=illegal)


def _refused(_rank: int, _world: int, refuses: Any) -> str:
    _without()
    try:
        refuses()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "nothing"


def _parallelizes() -> None:
    torch_ext.parallelize(Given(SHAPES, BF16), policy(BF16, grad_comm_compression=ALWAYS))


def _registers() -> None:
    ddp = DistributedDataParallel(Given(SHAPES, BF16))
    torch_ext.register_comm_hook(ddp, policy(BF16, grad_comm_compression=ALWAYS))


@pytest.mark.parametrize("refuses", [_parallelizes, _registers])
def test_always_is_refused_before_anything_is_changed(refuses: Any) -> None:
    for message in ranks.run(2, _refused, refuses):
        assert "grad_comm_compression='on'" in message


def _disagrees(rank: int, _world: int) -> list[str]:
    """Returns the errors of ranks whose policies differ in the compression."""
    chosen, said = policy(BF16, grad_comm_compression=(PLAIN, AUTO)[rank]), []
    for model in (Given(SHAPES, BF16), DistributedDataParallel(Given(SHAPES, BF16))):
        take = torch_ext.parallelize if isinstance(model, Given) else torch_ext.register_comm_hook
        with pytest.raises(RuntimeError) as raised:
            take(model, chosen)  # type: ignore[operator]
        said.append(str(raised.value))
    return said


def test_ranks_agree_on_it() -> None:
    for said in ranks.run(2, _disagrees):
        assert len(said) == 2 and all("compression off" in message for message in said), said


def test_only_bf16_that_is_long_enough_is_compressed() -> None:
    assert compression.size(4096, BF16) == 8 + 32 * 194 + 2 * (8 + 16)
    assert [compression.size(n, BF16) for n in (0, 128, 4096 - 128, 4096 + 1)] == [0] * 4
    assert [compression.size(8192, dtype) for dtype in (FP32, torch.float16, torch.uint8)] == [0] * 3


def test_the_plan_counts_messages() -> None:
    shapes = {f"p{i}": torch.empty(s, dtype=BF16) for i, s in enumerate(SHAPES)}
    for strategy in strategy_names()[:3]:
        plain, always = (
            memory_plan.plan_memory(shapes, policy(BF16, bucket_size=BUCKET, grad_comm_compression=c), 2, [strategy])[0]
            for c in (PLAIN, ALWAYS)
        )
        assert plain.total == always.total
        assert plain.transient < always.transient < 3 * plain.transient
