"""The exchange over streams: every read of a message's memory must be ordered after the write, every reuse after the
last read, and the bits must be gloo's. The device is pretended (happens_before.py). FSDP2: test_streams_fsdp2.py."""

from typing import Any

import happens_before
import pytest
import ranks
import strategies
import torch
import torch.distributed as dist
from happens_before import FakeStreams
from streamed import DTYPES, trained

from torch_ext.comm import collectives, factory
from torch_ext.comm import streams as comm_streams
from torch_ext.comm.wire import WireBuffer, reduce_chunks


def _ordered(rank: int, world: int, strategy: str) -> None:
    """Trains with each dtype over the pretended device."""
    for name, dtypes in DTYPES.items():
        expected = trained(rank, strategy, dtypes)
        streams = FakeStreams()
        with happens_before.pretended(streams):
            found = trained(rank, strategy, dtypes)
        assert not streams.races, (name, streams.races[:5])
        assert found == expected, name
        assert {s.split()[0] for s in streams.used} >= {"compute", "side", "group"}


@pytest.mark.parametrize("strategy", [*strategies.STRATEGIES, "ddp hook"])
def test_every_access_is_ordered_and_the_bits_are_those_of_gloo(strategy: str) -> None:
    ranks.run(2, _ordered, strategy, limit=80.0)


def _nothing(*_args: Any) -> None:
    pass


def _without(monkeypatch: Any, cls: Any, name: str) -> None:
    """Makes a method do nothing."""
    monkeypatch.setattr(cls, name, _nothing)


def _slots_at_once(monkeypatch: Any) -> None:
    """Takes slots without waiting for their last use."""
    take = comm_streams.Slots.take

    def early(self: Any, role: str, nbytes: int) -> Any:
        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(FakeStreams, "wait", _nothing)
            return take(self, role, nbytes)

    monkeypatch.setattr(comm_streams.Slots, "take", early)


def _forgetful(monkeypatch: Any) -> None:
    """Drops the gradients before the stream that packs them is known to be done."""
    made = collectives._Reduction.__init__

    def init(self: Any, *args: Any) -> None:
        made(self, *args)
        self.request = self.request._replace(pack_fn=_nothing)

    monkeypatch.setattr(collectives._Reduction, "__init__", init)


# By what is left out: (a function that leaves it out, what the checker must then report).
BROKEN = {
    "a bucket leaves at once": (lambda m: _without(m, comm_streams.Ordering, "_wait_for_producers"), "does not follow"),
    "a slot is used again at once": (_slots_at_once, "does not follow"),
    "a sum waits for no bytes": (lambda m: m.setattr(happens_before._Work, "wait", _nothing), "does not follow"),
    "nobody waits for the sum": (lambda m: _without(m, comm_streams.Ordering, "wait"), "does not follow"),
    "the sum's event is not recorded": (
        lambda m: _without(m, comm_streams.Ordering, "record_received"),
        "does not follow",
    ),
    "gradients are freed at once": (_forgetful, "memory of compute is handed out again"),
}


def _broken(rank: int, world: int) -> dict[str, list[str]]:
    """Returns the races with each of BROKEN."""
    found = {}
    for name, (breaks, _) in BROKEN.items():
        streams = FakeStreams()
        with pytest.MonkeyPatch.context() as monkeypatch, happens_before.pretended(streams):
            breaks(monkeypatch)
            trained(rank, "optim_grads", DTYPES["bf16-main-fp32"])
        found[name] = streams.races
    return found


def test_what_is_left_out_is_noticed() -> None:
    for races in ranks.run(2, _broken, limit=80.0):
        for name, (_, says) in BROKEN.items():
            assert any(says in race for race in races[name]), (name, races[name][:3])


def _writers(rank: int, world: int, told: bool) -> list[str]:
    """Two streams write into a bucket that a third one sends. told: whether the exchange is told of the writers."""
    streams = FakeStreams()
    with happens_before.pretended(streams):
        exchange = factory.make_communicator(dist.group.WORLD, torch.device("cpu"))
        for bucket in range(5):
            main = torch.zeros(256)
            made = streams.event()
            streams.record(made, streams.current())
            for half, stream in enumerate(("forward 1", "forward 2")):
                with streams.on(stream):
                    streams.wait(stream, made)
                    main[128 * half : 128 * half + 128] += 1.0 + rank
                    if told:
                        exchange.ordering.record_producer()
            handle = exchange.reduce_scatter(
                WireBuffer.of(main),
                lambda chunks, part, main=main: reduce_chunks(chunks, WireBuffer.of(main).part(*part).data, 1.0),
                result=WireBuffer.of(main),
                tag=2 * bucket,
                label="a bucket",
            )
            handle.result()
            assert (main + 0.0).eq(3.0).all()
            exchange.ordering.forget_producers()
    return streams.races


def test_a_bucket_waits_for_every_stream_that_wrote_into_it() -> None:
    assert ranks.run(2, _writers, True) == [[], []]
    assert all("forward 2" in " ".join(races) for races in ranks.run(2, _writers, False))


def _reports(rank: int, world: int) -> None:
    """Each group with no back end for the host needs one more group, for reports: here the world and its two halves."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    factory.backend = collectives.backend = lambda group, device: "nccl"
    for group, members in ((dist.group.WORLD, [0, 1, 2, 3]), (groups[rank % 2], [rank % 2, rank % 2 + 2])):
        for _ in range(2):
            control = collectives.control_communicator(group, torch.device("cpu"))
            assert control.group is not group and dist.get_process_group_ranks(control.group) == members
            got = control.all_gather_bytes(torch.tensor([rank], dtype=torch.uint8), tag=4, label="a report")()
            assert [int(r) for r in got] == members
    assert len(collectives._groups) == 2


def test_reports_travel_between_hosts_beside_groups_for_devices_only() -> None:
    ranks.run(4, _reports)


@pytest.mark.parametrize("most", [1, 2, 5])
def test_two_slots_for_each_size_class(most: int) -> None:
    slots = comm_streams.Slots(comm_streams.HostStreams(), lambda n: torch.empty(n, dtype=torch.uint8))
    for nbytes in (700, 1000 * most):
        first, second = slots.take("wire", nbytes), slots.take("wire", nbytes)
        assert first is not None and second is not None and first.memory.numel() >= nbytes
        assert slots.take("wire", nbytes) is None and slots.take("received", nbytes) is not None
        slots.give_back(second)
        slots.give_back(first)
        assert slots.take("wire", nbytes) is second, "the one that has been free for longest"


def test_a_size_class_is_not_less_and_at_most_a_quarter_more() -> None:
    classes = set()
    for nbytes in [*range(1, 5000), 2**20 - 1, 2**20, 2**20 + 1, 10**9]:
        found = comm_streams.size_class(nbytes)
        classes.add(found)
        assert nbytes <= found and (found == 512 or found < 1.25 * nbytes) and comm_streams.size_class(found) == found
    assert {512, 640, 768, 896, 1024, 1280} <= classes and len(classes) < 20
