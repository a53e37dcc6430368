"""The communicators below buckets and strategies: which one a group gets, the tags and the memory of messages, and that
no memory is overwritten before its message has been sent."""

from typing import Any

import pytest
import ranks
import strategies
import torch
import torch.distributed as dist
from gradients import BF16, FP32, Given, policy
from works import Work

import torch_ext
from torch_ext.comm import communicator, compression, factory, gloo, gloo_p2p, init_sync
from torch_ext.comm.communicator import Part
from torch_ext.comm.wire import WireBuffer, reduce_chunks
from torch_ext.native import library
from torch_ext.parallel import parallelize_checks
from torch_ext.parallel.grad_buffers import TemporaryBuckets

NUMEL = 8192
CPU = torch.device("cpu")

# -- which communicator, and what the ranks agree on ---------------------------------------------------------------


def _by_back_end(rank: int, world: int) -> tuple[str, str]:
    groups = (dist.group.WORLD, ranks.group_with_collectives())
    one, other = (type(factory.make_communicator(group, CPU)).__name__ for group in groups)
    return one, other


def test_messages_from_rank_to_rank_are_for_gloo_alone() -> None:
    assert ranks.run(2, _by_back_end) == [("GlooCommunicator", "CollectiveCommunicator")] * 2


def _other_version(rank: int, world: int, strategy: str) -> str:
    """Rank 1 pretends to have another version of the library; returns the error. The group must work afterwards."""
    real = library.function
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(
                init_sync.library,
                "function",
                lambda name, *a, **k: (lambda: (9 << 16) + (1 << 8)) if name == "tx_version" else real(name, *a, **k),
            )
        with pytest.raises(RuntimeError) as raised:
            torch_ext.parallelize(Given([4]), policy(), strategy=strategy)
    dist.barrier()  # the group still works
    torch_ext.parallelize(Given([4]), policy(), strategy=strategy)
    return str(raised.value)


def test_f6_ranks_with_libraries_of_different_versions_get_a_message() -> None:
    for messages in strategies.run(3, _other_version).values():
        assert len(set(messages)) == 1
        assert "rank 1 has 'torch_ext 9.1.0'" in messages[0] and "nothing was exchanged" in messages[0]


def test_engine_has_an_own_name_for_every_message() -> None:
    """Two messages that may be in flight at a time must have different tags."""
    tags = [
        communicator.tag(engine, cycle, bucket) + half
        for engine in (0, 1, communicator._REDUCERS - 1)
        for cycle in (0, 1, communicator._CYCLES - 1)
        for bucket in (0, 1, communicator.MAX_BUCKETS)
        for half in (0, 1)
    ]
    assert len(set(tags)) == len(tags) and all(2**30 <= t < 2**31 for t in tags)
    assert parallelize_checks.MAX_BUCKETS == communicator.MAX_BUCKETS


# -- the memory of a bucket in the wire's dtype ----------------------------------------------------------------------


def _temporary(rank: int, world: int, back_end: str) -> None:
    """While a bucket's memory is in use, it cannot be requested with another size or dtype."""
    group = dist.group.WORLD if back_end == "gloo" else ranks.group_with_collectives()
    buckets = TemporaryBuckets(factory.make_communicator(group, CPU))
    wire = buckets.take(3, 256, BF16)
    assert wire.data.shape == (256,) and wire.data.dtype == BF16 and buckets.take(3, 256, BF16) is wire
    for numel, dtype in ((128, BF16), (256, FP32), (256, torch.uint8)):
        with pytest.raises(RuntimeError, match="bucket 3 has 256 elements of torch.bfloat16 in use"):
            buckets.take(3, numel, dtype)
    assert buckets.take(3, 256, FP32, gathered=True).data.dtype == FP32, "what is gathered lies elsewhere"
    codes = buckets.take(4, 256, torch.uint8)
    assert codes.data.dtype == torch.uint8 and codes.scales.numel() == 2 and len(buckets) == 3
    buckets.give_back(3)
    assert buckets.take(3, 128, FP32).data.numel() == 128
    buckets.give_back(3)
    buckets.give_back(4)
    buckets.give_back(3, gathered=True)
    assert len(buckets) == 0


@pytest.mark.parametrize("back_end", ["gloo", "another"])
def test_e9_a_temporary_bucket_is_of_the_dtype_and_size_it_was_made_with(back_end: str) -> None:
    ranks.run(1, _temporary, back_end)


# -- when sums are written -----------------------------------------------------------------------------------------


class Waited:
    """A message that records when it was waited for."""

    def __init__(self, work: dist.Work, waits: list[str]) -> None:
        self.work, self.waits = work, waits

    def wait(self) -> None:
        self.work.wait()
        self.waits.append("sent")

    def is_completed(self) -> bool:
        return self.work.is_completed()


def _all_reduced(_rank: int, world: int, scattered: bool) -> tuple[list[Any], list[float], int]:
    """Returns the order of events, the sums, and the bytes sent for 256 fp32 elements per rank."""
    exchange = factory.make_communicator(dist.group.WORLD, CPU)
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
    """Checks where and when sums are written. A sum must not overwrite our own part before that part has been sent."""
    for rank, (happened, sums, sent) in enumerate(ranks.run(world, _all_reduced, scattered)):
        mean = 0.5 * sum(range(1, world + 1))
        assert sums == ([mean] if not scattered else sorted({mean, 1.0 + rank}))
        assert happened.index((rank, world)) == 0
        assert sent == 1024 * (world - 1) * (1 if scattered else 2)


# -- the memory of compressed messages: reused as soon as all sends of it are complete, and not before. Without ranks --


def _values(disordered: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    sizes = torch.randint(-60, 60, (NUMEL,), generator=generator) * disordered
    return torch.ldexp(torch.randn(NUMEL, generator=generator), sizes).to(torch.bfloat16)


def _message(pool: Any, values: torch.Tensor | None = None) -> Any:
    return gloo_p2p.CompressedMessage(_values() if values is None else values, pool)


def _next_addresses(pool: Any, count: int) -> list[int]:
    """Returns the addresses of the memory that the next messages get, and keeps that memory in use."""
    memories = [pool.lend(compression.size(NUMEL, torch.bfloat16), CPU) for _ in range(count)]
    pool.kept = memories
    return [memory.data_ptr() for memory in memories]


def test_what_several_ranks_are_sent_is_kept_for_the_last() -> None:
    pool: Any = gloo_p2p.MemoryPool()
    message = _message(pool)
    where = message.bytes.data_ptr()
    first, second = (gloo_p2p.PendingSend(message, Work()) for _ in range(2))
    first.wait()
    assert where not in _next_addresses(pool, 1)
    second.wait()
    assert _next_addresses(pool, 1) == [where]


@pytest.mark.parametrize("others", [0, 1], ids=["all", "another-is-on-its-way"])
def test_a_message_that_is_waited_for_twice_is_given_back_once(others: int) -> None:
    pool: Any = gloo_p2p.MemoryPool()
    message = _message(pool)
    where = message.bytes.data_ptr()
    sent, *_ = [gloo_p2p.PendingSend(message, Work()) for _ in range(1 + others)]
    sent.wait()
    sent.wait()
    found = _next_addresses(pool, 2)
    assert found.count(where) == 1 - others
    assert len(set(found)) == 2, "two messages in one memory"


def _arriving(pool: Any, values: torch.Tensor) -> tuple[Any, torch.Tensor, list[Work]]:
    """Returns a message that is being received into a tensor, the tensor, and the Works of its parts."""
    wire = torch.empty(compression.size(NUMEL, torch.bfloat16), dtype=torch.uint8)
    rest = compression.compress(values, wire)
    sent = [wire, compression.end_of(values, rest)]
    into, works = torch.zeros_like(values), []

    def receive(to: torch.Tensor) -> Work:
        works.append(Work(lambda: to.copy_(sent.pop(0))))
        return works[-1]

    return gloo_p2p.PendingRecv(_message(pool, into), receive), into, works


@pytest.mark.parametrize("disordered", [False, True], ids=["ordinary", "disordered"])
def test_what_arrives_is_there_after_the_first_wait_and_stays(disordered: bool) -> None:
    pool: Any = gloo_p2p.MemoryPool()
    values = _values(disordered)
    arriving, into, works = _arriving(pool, values)
    assert not arriving.is_completed()
    arriving.wait()
    assert arriving.is_completed()
    assert torch.equal(into.view(torch.int16), values.view(torch.int16))
    found = _next_addresses(pool, 1)
    pool.kept[0].fill_(0x5A)  # the next message overwrites the memory
    arriving.wait()
    assert torch.equal(into.view(torch.int16), values.view(torch.int16))
    assert [work.waits for work in works] == [1] * (1 + disordered)
    assert found[0] not in _next_addresses(pool, 2), "given back twice"


def _exchange(monkeypatch: pytest.MonkeyPatch, world_size: int) -> tuple[Any, list[tuple[int, torch.Tensor]]]:
    """Returns rank 0's communicator, which compresses, and a list of what it sends to which rank."""
    sent: list[tuple[int, torch.Tensor]] = []

    def send(messages: list[torch.Tensor], peer: int, tag: int) -> Work:
        sent.extend((peer, message) for message in messages)
        return Work()

    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group: world_size)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: list(range(world_size)))
    group: Any = type("Group", (), {"send": staticmethod(send)})()  # failures are looked up by it, as by a real group
    exchange = gloo.GlooCommunicator(group, CPU)
    exchange.compresses = True
    return exchange, sent


def test_what_all_ranks_are_sent_is_compressed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    exchange, sent = _exchange(monkeypatch, 4)
    values = _values()
    works = exchange.send([WireBuffer.of(values)] * 4, tag=1, label="it")
    assert [peer for peer, _ in sent] == [1, 2, 3]
    assert len({message.data_ptr() for _, message in sent}) == 1
    where = sent[0][1].data_ptr()
    for _, work in works:
        assert where not in _next_addresses(exchange._compressed_memory, 1)
        work.wait()
    assert _next_addresses(exchange._compressed_memory, 1) == [where]


def test_each_rank_is_sent_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    exchange, sent = _exchange(monkeypatch, 3)
    parts = [WireBuffer.of(_values() * scale) for scale in (1, 2, 3)]
    exchange.send(parts, tag=1, label="it")
    for peer, message in sent:
        into = torch.empty_like(parts[peer].data)
        assert compression.expand(message, into) == 0
        assert torch.equal(into, parts[peer].data)
