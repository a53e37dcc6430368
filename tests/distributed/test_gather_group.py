"""create_all_gather_group: all-gathers have a communicator and a stream of their own, over a pretended NCCL and a
pretended device. Every access is ordered, the bits are those of gloo, and no gather waits for a reduction."""

import datetime
import os
import pathlib
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import happens_before
import pretended_nccl
import pytest
import ranks
import strategies
import streamed
import torch
import torch.distributed as dist
from gradients import Given, policy
from happens_before import FakeStreams

import torch_ext
from torch_ext.comm import factory, gather_group, nccl_transport
from torch_ext.native import nccl
from torch_ext.parallel import ddp_connection, parallelize

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> str:
    return pretended_nccl.built(tmp_path_factory.mktemp("nccl"), "newest")["newest"]


def _apart(patch: pytest.MonkeyPatch, transport: str) -> None:
    """Whoever makes a communicator makes it so; `streamed.trained` has a policy of its own."""
    over = factory.make_communicator
    for module in (parallelize, ddp_connection):
        patch.setattr(module, "make_communicator", lambda group, device, *_: over(group, device, transport, True))


def _trained(rank: int, world: int, transport: str, path: str, strategy: str) -> dict[str, Any]:
    pretended_nccl.use(path)
    found: dict[str, Any] = {}
    streams = FakeStreams()
    for name, dtypes in streamed.DTYPES.items():
        expected = streamed.trained(rank, strategy, dtypes)
        with pytest.MonkeyPatch.context() as patch, happens_before.pretended(streams):
            pretended_nccl.note_accesses(streams, patch)
            _apart(patch, transport)
            assert streamed.trained(rank, strategy, dtypes) == expected, name
        found[name] = streams.races
        if transport == "torch":
            assert {"group 0", "group 1"} <= streams.used, streams.used
    return found


@pytest.mark.parametrize("strategy", [*strategies.STRATEGIES, "ddp hook"])
def test_a_training_over_two_groups_has_the_bits_of_gloo(strategy: str) -> None:
    for found in ranks.run(2, _trained, "torch", "", strategy, limit=90.0):
        assert not any(found.values()), found


@pytest.mark.parametrize("strategy", [*strategies.STRATEGIES, "ddp hook"])
def test_a_training_over_two_communicators_has_the_bits_of_gloo(fake: str, strategy: str) -> None:
    (found,) = ranks.run(1, _trained, "nccl", fake, strategy, limit=90.0)
    assert not any(found.values()), found


def _order(rank: int, world: int, path: str, transport: str) -> list[bool]:
    """Whether a gather that is started after a reduction follows it: without and with a communicator of its own."""
    pretended_nccl.use(path)
    found = []
    for apart in (False, True):
        streams = FakeStreams()
        with pytest.MonkeyPatch.context() as patch, happens_before.pretended(streams):
            pretended_nccl.note_accesses(streams, patch)
            made: Any = factory.make_communicator(dist.group.WORLD, CPU, transport, apart)
            n = 256 * world
            sent, into, whole = (torch.zeros(n, dtype=torch.uint8) for _ in range(3))
            with streams.on("reduces"):
                made.transport.all_to_all([into], [sent], "gradients of bucket 1")
            with streams.on("gathers"):
                (work,) = made.transport.all_gather([whole], rank, "weights of bucket 0")
                work.wait()
            if transport == "nccl":
                reductions = made.transport._stream
            else:
                reductions = streams.of_group(dist.group.WORLD)
            found.append(streams.knows("gathers", reductions))
    return found


@pytest.mark.parametrize("transport", ["torch", "nccl"])
def test_a_gather_does_not_follow_a_reduction_that_was_started_before_it(fake: str, transport: str) -> None:
    world = 2 if transport == "torch" else 1
    assert ranks.run(world, _order, fake, transport) == [[True, False]] * world


def _without(rank: int, world: int, path: str) -> list[str]:
    """Gathers that do not follow the step that wrote their weights."""
    pretended_nccl.use(path)
    streams = FakeStreams()
    wait = FakeStreams.wait

    def deaf(self: Any, stream: str, event: Any) -> None:
        if stream not in gathers:
            wait(self, stream, event)

    gathers: set[str] = set()
    issue = nccl_transport.NcclTransport._issue

    def issued(self: Any, *arguments: Any) -> Any:
        gathers.add(self._gather_stream)
        return issue(self, *arguments)

    with pytest.MonkeyPatch.context() as patch, happens_before.pretended(streams):
        patch.setattr(nccl_transport.NcclTransport, "_issue", issued)
        pretended_nccl.note_accesses(streams, patch)
        patch.setattr(FakeStreams, "wait", deaf)
        _apart(patch, "nccl")
        streamed.trained(rank, "optim", streamed.DTYPES["fp32"])
    return streams.races


def test_a_gather_that_waits_for_nobody_is_noticed(fake: str) -> None:
    (races,) = ranks.run(1, _without, fake)
    assert any(race.startswith("weights of") and "does not follow" in race for race in races), races[:3]


class _Hanging(FakeStreams):
    def query(self, event: Any) -> bool:
        return False


def _transport(streams: FakeStreams) -> Any:
    assert dist.group.WORLD is not None
    return nccl_transport.transport_of(dist.group.WORLD, CPU, streams, True)


def _hangs(rank: int, world: int, path: str) -> list[str]:
    """A gather that does not end is aborted with its label, and reductions are refused from then on."""
    pretended_nccl.use(path)
    transport, said = _transport(_Hanging()), []
    whole, into = torch.zeros(256, dtype=torch.uint8), torch.zeros(256, dtype=torch.uint8)
    transport.all_gather([whole], 0, "weights of bucket 3")
    assert not transport._watchdog.poll(time.monotonic() + 1e6)
    for again in (
        lambda: transport.all_to_all([into], [whole], "gradients of bucket 0"),
        lambda: transport.all_gather([whole], 0, "weights of bucket 4"),
    ):
        with pytest.raises(RuntimeError) as error:
            again()
        said.append(str(error.value))
    return said


def test_a_gather_that_hangs_takes_the_reductions_with_it(fake: str) -> None:
    ((of_reduction, of_gather),) = ranks.run(1, _hangs, fake)
    assert "gradients of bucket 0" in of_reduction and "weights of bucket 4" in of_gather
    for text in (of_reduction, of_gather):
        assert "weights of bucket 3 was not done after" in text


def _refused(rank: int, world: int, path: str) -> str:
    """NCCL makes the first communicator and refuses the second."""
    pretended_nccl.use(path)
    made = nccl.unique_id
    ids = iter(range(2))
    patch = pytest.MonkeyPatch()
    patch.setattr(nccl, "unique_id", lambda: (next(ids), made())[1])
    import ctypes

    pretended = ctypes.CDLL(path)
    number = int(made()[3:].rstrip(b"\0")) + 2  # the second of the two ids to come
    pretended.fake_nccl_init_error(2)
    pretended.fake_nccl_errors_of(number)
    whole = torch.zeros(256, dtype=torch.uint8)
    with pytest.raises(RuntimeError) as error:
        _transport(FakeStreams()).all_gather([whole], 0, "weights of bucket 0")
    counts = (ctypes.c_int * 6)()
    pretended.fake_nccl_counts(counts)
    assert counts[0] == 1, "the first was aborted"
    return str(error.value)


def test_a_second_communicator_that_is_refused_is_an_error_and_leaves_nothing(fake: str) -> None:
    (said,) = ranks.run(1, _refused, fake)
    assert "making the gathers' communicator on rank 0 of 1: NCCL says: unhandled system error" in said


def test_a_process_ends_with_both_still_there(fake: str, tmp_path: pathlib.Path) -> None:
    code = """
import sys, torch, torch.distributed as dist
import test_gather_group, pretended_nccl
from happens_before import FakeStreams
pretended_nccl.use(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=0, world_size=1)
transport = test_gather_group._transport(FakeStreams())
whole = torch.zeros(256, dtype=torch.uint8)
transport.all_gather([whole], 0, "weights")
transport.all_to_all([torch.zeros_like(whole)], [whole], "gradients")
if sys.argv[3] == "destroyed":
    dist.destroy_process_group()
"""
    here = [str(pathlib.Path(__file__).parent), *sys.path, os.getcwd()]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in here if p)}
    for way in ("just ends", "destroyed"):
        command = [sys.executable, "-c", code, fake, str(tmp_path / way), way]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
        assert ran.returncode == 0 and not ran.stderr, ran.stderr


def _groups(rank: int, world: int) -> None:
    """One for each group, between its ranks, with its timeout; what another asks for is the same."""
    halves = [dist.new_group([0, 2], datetime.timedelta(seconds=33)), dist.new_group([1, 3])]
    mine = halves[rank % 2]
    made = gather_group.gather_group_of(mine, CPU)
    assert made is not mine and gather_group.gather_group_of(mine, CPU) is made
    assert dist.get_process_group_ranks(made) == [rank % 2, rank % 2 + 2]
    whole = torch.full((2,), float(rank))
    dist.all_reduce(whole, group=made)
    assert whole.tolist() == [2.0 * (rank % 2) + 2.0] * 2


def test_one_group_of_gathers_for_each_group() -> None:
    ranks.run(4, _groups)


def test_torchs_nccl_is_told_how_many_blocks_may_run(monkeypatch: pytest.MonkeyPatch) -> None:
    made = SimpleNamespace(config=SimpleNamespace(max_ctas=0))
    pretended = SimpleNamespace(Options=lambda: made)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", pretended, raising=False)
    monkeypatch.setattr(gather_group, "streams_of", lambda device: FakeStreams())
    assert gather_group._options(torch.device("cuda", 0)) is made and made.config.max_ctas == 33


def _agreed(rank: int, world: int) -> str:
    with pytest.raises(RuntimeError) as error:
        torch_ext.parallelize(Given([4]), policy(create_all_gather_group=rank == 1))
    return str(error.value)


def test_ranks_that_differ_in_it_are_told() -> None:
    for said in ranks.run(2, _agreed):
        assert "a group for all-gathers" in said
