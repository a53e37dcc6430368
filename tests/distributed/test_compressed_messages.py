"""A compressed message's memory is its own until everybody is done with it, and the next one's then. Without ranks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from works import Work

from torch_ext.comm import compression, gloo, gloo_p2p
from torch_ext.comm.wire import WireBuffer

NUMEL = 8192
CPU = torch.device("cpu")


def _values(disordered: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    sizes = torch.randint(-60, 60, (NUMEL,), generator=generator) * disordered
    return torch.ldexp(torch.randn(NUMEL, generator=generator), sizes).to(torch.bfloat16)


def _message(pool: Any, values: torch.Tensor | None = None) -> Any:
    return gloo_p2p.CompressedMessage(_values() if values is None else values, pool)


def _lent(pool: Any, count: int) -> list[int]:
    """Where the next messages would lie; what is found is kept in use."""
    memories = [pool.lend(compression.size(NUMEL, torch.bfloat16), CPU) for _ in range(count)]
    pool.kept = memories
    return [memory.data_ptr() for memory in memories]


def test_what_several_ranks_are_sent_is_kept_for_the_last() -> None:
    pool: Any = gloo_p2p.MemoryPool()
    message = _message(pool)
    where = message.bytes.data_ptr()
    first, second = (gloo_p2p.PendingSend(message, Work()) for _ in range(2))
    first.wait()
    assert where not in _lent(pool, 1)
    second.wait()
    assert _lent(pool, 1) == [where]


@pytest.mark.parametrize("others", [0, 1], ids=["all", "another-is-on-its-way"])
def test_a_message_that_is_waited_for_twice_is_given_back_once(others: int) -> None:
    pool: Any = gloo_p2p.MemoryPool()
    message = _message(pool)
    where = message.bytes.data_ptr()
    sent, *_ = [gloo_p2p.PendingSend(message, Work()) for _ in range(1 + others)]
    sent.wait()
    sent.wait()
    found = _lent(pool, 2)
    assert found.count(where) == 1 - others
    assert len(set(found)) == 2, "two messages in one memory"


def _arriving(pool: Any, values: torch.Tensor) -> tuple[Any, torch.Tensor, list[Work]]:
    """On its way into a tensor of its own; the works of what is received."""
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
    found = _lent(pool, 1)
    pool.kept[0].fill_(0x5A)  # the next message's
    arriving.wait()
    assert torch.equal(into.view(torch.int16), values.view(torch.int16))
    assert [work.waits for work in works] == [1] * (1 + disordered)
    assert found[0] not in _lent(pool, 2), "given back twice"


def _exchange(monkeypatch: pytest.MonkeyPatch, world_size: int) -> tuple[Any, list[tuple[int, torch.Tensor]]]:
    """Of rank 0, compressing, and what it sends to whom."""
    sent: list[tuple[int, torch.Tensor]] = []

    def send(messages: list[torch.Tensor], peer: int, tag: int) -> Work:
        sent.extend((peer, message) for message in messages)
        return Work()

    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group: world_size)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: list(range(world_size)))
    group: Any = type("Group", (), {"send": staticmethod(send)})()  # which failures are found by, as a real one
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
        assert where not in _lent(exchange._compressed_memory, 1)
        work.wait()
    assert _lent(exchange._compressed_memory, 1) == [where]


def test_each_rank_is_sent_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    exchange, sent = _exchange(monkeypatch, 3)
    parts = [WireBuffer.of(_values() * scale) for scale in (1, 2, 3)]
    exchange.send(parts, tag=1, label="it")
    for peer, message in sent:
        into = torch.empty_like(parts[peer].data)
        assert compression.expand(message, into) == 0
        assert torch.equal(into, parts[peer].data)
