"""transport="nccl" over a pretended libnccl.so.2 (tests/core/fake_nccl.cc) and a pretended device (happens_before.py):
a training through a communicator of our own, ranks whose operations differ, the watchdog, errors."""

import contextlib
import ctypes
import datetime
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import happens_before
import pytest
import ranks
import strategies
import streamed
import torch
import torch.distributed as dist
from gradients import Given, policy
from happens_before import FakeStreams

import torch_ext
from torch_ext.comm import collectives, communicator, factory, gather_group, nccl_transport, process_group
from torch_ext.native import cuda_library, graph_capture, nccl
from torch_ext.parallel import ddp_connection, parallelize, parallelize_checks

SOURCE = pathlib.Path(__file__).parent.parent / "core/fake_nccl.cc"
VARIANTS = {"newest": [], "plain": ["-DFAKE_NCCL_VERSION=22105"], "old": ["-DFAKE_NCCL_VERSION=21803"]}


def _loaded() -> bool:
    """Whether torch has loaded a real NCCL, as its builds for CUDA do: that one would then be used."""
    try:
        ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD)
    except OSError:
        return False
    return True


def _built(folder: pathlib.Path, *variants: str) -> dict[str, str]:
    """Builds the pretended libraries; returns the path of each variant."""
    if _loaded():
        pytest.skip("this torch has loaded its own NCCL, which would be used; a torch for CPUs is needed")
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler to build the pretended NCCL with")
    made = {}
    for name in variants or VARIANTS:
        made[name] = str(folder / f"{name}.so")
        options = VARIANTS[name]
        subprocess.run([compiler, "-std=c++20", "-fPIC", "-shared", *options, "-o", made[name], SOURCE], check=True)
    return made


def _use(path: str) -> None:
    """Makes torch_ext use this library for the rest of the process."""
    os.environ[nccl.PATH_VARIABLE] = path
    nccl.find.cache_clear()


def _note_accesses(streams: FakeStreams, patch: pytest.MonkeyPatch) -> None:
    """Records what NCCL reads and writes, which torch's dispatcher does not see, for the stream it is issued to."""
    transport = nccl_transport.NcclTransport
    given: list[Any] = []
    plain = {kind: getattr(transport, kind) for kind in ("all_to_all", "all_gather", "_issue")}

    def all_to_all(self: Any, into: Any, sent: Any, what: str) -> Any:
        given[:] = [sent, into]
        return plain["all_to_all"](self, into, sent, what)

    def all_gather(self: Any, whole: Any, rank: int, what: str) -> Any:
        given[:] = [[], whole]
        return plain["all_gather"](self, whole, rank, what)

    def issue(self: Any, call: Any, messages: Any, what: str, stream: str) -> Any:
        def noted(what: str, messages: Any, pointer: int) -> None:
            with streams.on(stream):
                streams.touch(*given, what)
            call(what, messages, pointer)

        return plain["_issue"](self, noted, messages, what, stream)

    allocate = transport.allocate
    for kind, function in {"all_to_all": all_to_all, "all_gather": all_gather, "_issue": issue}.items():
        patch.setattr(transport, kind, function)
    patch.setattr(transport, "allocate", lambda self, nbytes: streams.foreign(allocate(self, nbytes)))


@pytest.fixture(scope="module")
def fakes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The path of each variant."""
    return _built(tmp_path_factory.mktemp("nccl"))


def _pretend_streams(patch: pytest.MonkeyPatch, streams_of: Callable[[torch.device], Any]) -> None:
    """Makes communicators use these streams."""
    for module in (communicator, factory):
        patch.setattr(module, "streams_of", streams_of)


def _trains_through_nccl(rank: int, world: int, path: str, strategy: str, breaks: bool = False) -> list[str]:
    """Trains through the pretended NCCL; the weights must have gloo's bits. Returns the races.

    breaks: removes the waits for NCCL, so that there must be races."""
    _use(path)
    over, streams = factory.make_communicator, FakeStreams()
    made: list[Any] = []
    plain = nccl.Comm.__init__
    nccl.Comm.__init__ = lambda self, *args: (made.append(self), plain(self, *args))[1]  # type: ignore[assignment]
    for name, dtypes in streamed.DTYPES.items():
        expected = streamed.trained(rank, strategy, dtypes)
        with pytest.MonkeyPatch.context() as patch, happens_before.pretended(streams):
            _note_accesses(streams, patch)
            if breaks:
                patch.setattr(nccl_transport._Issued, "wait", lambda self: None)
            for module in (parallelize, ddp_connection):
                patch.setattr(module, "make_communicator", lambda group, device, *_: over(group, device, "nccl"))
            assert streamed.trained(rank, strategy, dtypes) == expected, name
    (comm,) = made
    assert comm.digest()[0] > 50 and comm._memories, "one for each process group; memory of slots is NCCL's"
    return streams.races


@pytest.mark.parametrize("strategy", [*strategies.STRATEGIES, "ddp hook"])
def test_a_training_through_it_has_the_bits_of_gloo(fakes: dict[str, str], strategy: str) -> None:
    variant = "newest" if strategy != "optim" else "plain"
    assert ranks.run(1, _trains_through_nccl, fakes[variant], strategy, limit=80.0) == [[]]


def test_a_sum_that_does_not_wait_for_nccl_is_noticed(fakes: dict[str, str]) -> None:
    (races,) = ranks.run(1, _trains_through_nccl, fakes["newest"], "optim", True, limit=80.0)
    assert any("does not follow gradients of cycle" in race for race in races), races[:3]


def _parted(rank: int, world: int, path: str) -> str:
    """Each rank's communicator has this rank only, and hashes its operations as usual. Returns the error."""
    _use(path)
    made = nccl.Comm
    patch = pytest.MonkeyPatch()
    patch.setattr(nccl, "Comm", lambda _id, _rank, _world, timeout: made(nccl.unique_id(), 0, 1, timeout))
    _pretend_streams(patch, lambda device: FakeStreams())
    exchange: Any = factory.make_communicator(dist.group.WORLD, torch.device("cpu"), "nccl")
    payload = torch.tensor([rank], dtype=torch.uint8)
    sent, into = torch.zeros(256, dtype=torch.uint8), torch.zeros(256, dtype=torch.uint8)
    for cycle in range(3):
        for bucket in range(2):
            exchange.transport.all_to_all([into], [sent], f"bucket {bucket}")
        reports = exchange.all_gather_bytes(payload, tag=2 * cycle, label="end")()
        assert [r.tolist() for r in reports] == [[0], [1]]
    exchange.transport.all_to_all([into], [sent], f"bucket {rank} of cycle 3")
    with pytest.raises(RuntimeError) as first:
        exchange.all_gather_bytes(payload, tag=6, label="end")()
    with pytest.raises(RuntimeError, match="was aborted and cannot be used any more"):
        exchange.transport.all_to_all([into], [sent], "bucket 9")
    return str(first.value)


def test_ranks_that_parted_are_told_where_with_both_hashes(fakes: dict[str, str]) -> None:
    one, other = ranks.run(2, _parted, fakes["newest"])
    assert one == other and "operation 7 is all-to-all of bucket 1 of cycle 3 (hash " in one
    assert "on rank 1 and all-to-all of bucket 0 of cycle 3 (hash " in one


class _Hanging(FakeStreams):
    """Streams on which no event ever completes."""

    def query(self, event: Any) -> bool:
        return False


def _watched(rank: int, world: int, path: str) -> None:
    """Polls a watchdog before and after its time-out, with operations that end and with ones that do not."""
    _use(path)
    for streams, now, ends in ((FakeStreams(), 1e9, False), (_Hanging(), 6.0, False), (_Hanging(), 8.0, True)):
        comm = nccl.Comm(nccl.unique_id(), 0, 1, 5.0)
        dog = nccl_transport.Watchdog(streams, comm, 7.0)
        dog.watch(nccl_transport._Issued(streams, streams.event(), "all-to-all of bucket 3", time.monotonic()))
        assert dog.poll(time.monotonic() + now) is not ends
        if ends:
            with pytest.raises(
                RuntimeError, match="all-to-all of bucket 3 was not done after 7 s, the process group's"
            ):
                comm.check()
            assert dog.poll(0.0) is False, "it ends with its communicator"
        comm.close()


def test_what_does_not_end_is_aborted_by_name(fakes: dict[str, str]) -> None:
    ranks.run(1, _watched, fakes["newest"])


class _Blind(FakeStreams):
    """Streams whose events cannot be queried for the first `times` times. Records which thread is allowed to query."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times
        self.relaxed: list[str] = []

    def query(self, event: Any) -> bool:
        assert threading.current_thread().name in self.relaxed
        self.times -= 1
        if self.times >= 0:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        return True

    @contextlib.contextmanager
    def polling(self) -> Iterator[None]:
        self.relaxed.append(threading.current_thread().name)
        yield
        self.relaxed.remove(threading.current_thread().name)


def _blind(rank: int, world: int, path: str) -> tuple[str, list[str]]:
    """Returns the error for an event that can never be queried, and what both watchdogs end with."""
    _use(path)
    said = []
    patch = pytest.MonkeyPatch()
    patch.setattr(nccl_transport.Watchdog, "PERIOD", 0.01)
    for times in (3, 10**9):
        comm, streams = nccl.Comm(nccl.unique_id(), 0, 1, 5.0), _Blind(times)
        dog = nccl_transport.Watchdog(streams, comm, 0.2)
        begin = time.monotonic() + (3600.0 if times == 3 else 0.0)  # the first one must not time out
        dog.watch(nccl_transport._Issued(streams, streams.event(), "all-to-all of bucket 3", begin))
        dog.start()
        deadline = time.monotonic() + 20.0
        while dog._under_way and time.monotonic() < deadline:
            try:
                comm.check()
            except RuntimeError as error:
                said.append(str(error))
                break
            time.sleep(0.005)
        dog.end()
        said.append("passed" if not dog._under_way else "left")
        comm.close()
    return said[-2], said


def test_an_event_that_cannot_be_asked_for_is_asked_for_again(fakes: dict[str, str]) -> None:
    ((why, said),) = ranks.run(1, _blind, fakes["newest"])
    assert len(said) == 3 and said[0] == "passed" and said[2] == "left"
    assert "all-to-all of bucket 3 was not done after 0.2 s" in why
    assert "its event could not be queried: CUDA error: operation not permitted when stream is capturing" in why


class _Broken(FakeStreams):
    """Streams whose events raise when they are queried."""

    def query(self, event: Any) -> bool:
        raise MemoryError("none left")


def _failed(rank: int, world: int, path: str) -> str:
    """Returns the error after a watchdog's own thread has failed."""
    _use(path)
    pytest.MonkeyPatch().setattr(nccl_transport.Watchdog, "PERIOD", 0.01)
    comm, streams = nccl.Comm(nccl.unique_id(), 0, 1, 5.0), _Broken()
    dog = nccl_transport.Watchdog(streams, comm, 7.0)
    dog.watch(nccl_transport._Issued(streams, streams.event(), "all-to-all of bucket 3", time.monotonic()))
    dog.start()
    deadline = time.monotonic() + 20.0
    while time.monotonic() < deadline:
        try:
            comm.check()
        except RuntimeError as error:
            return str(error)
        time.sleep(0.005)
    return "nothing"


def test_a_watchdog_that_fails_says_so(fakes: dict[str, str]) -> None:
    assert "its watchdog failed: none left" in ranks.run(1, _failed, fakes["newest"])[0]


def _captured(rank: int, world: int, path: str) -> list[int]:
    """Returns how many operations the watchdog watches: after one, and after another that is captured."""
    _use(path)
    patch = pytest.MonkeyPatch()
    _pretend_streams(patch, lambda device: _Hanging())
    exchange: Any = factory.make_communicator(dist.group.WORLD, torch.device("cpu"), "nccl")
    sent, into = torch.zeros(256, dtype=torch.uint8), torch.zeros(256, dtype=torch.uint8)
    watched = []
    for captures in (False, True):
        patch.setattr(graph_capture, "is_capturing", lambda device, captures=captures: captures)
        exchange.transport.all_to_all([into], [sent], "bucket")
        watched.append(len(exchange.transport._watchdog._under_way))
    return watched


def test_nobody_waits_for_what_is_captured(fakes: dict[str, str]) -> None:
    assert ranks.run(1, _captured, fakes["newest"]) == [[1, 1]]


def _as_long_as_the_group(rank: int, world: int, path: str) -> tuple[float, str]:
    """Returns the time-out that the communicator got from a process group of 33 s, and the watchdog's error."""
    _use(path)
    made, waits = nccl.Comm, []
    patch = pytest.MonkeyPatch()
    patch.setattr(
        nccl, "Comm", lambda name, r, n, timeout: (waits.append(timeout), made(nccl.unique_id(), 0, 1, timeout))[1]
    )
    _pretend_streams(patch, lambda device: _Hanging())
    group = dist.new_group(timeout=datetime.timedelta(seconds=33))
    exchange: Any = factory.make_communicator(group, torch.device("cpu"), "nccl")
    sent, into = torch.zeros(256, dtype=torch.uint8), torch.zeros(256, dtype=torch.uint8)
    exchange.transport.all_to_all([into], [sent], "bucket 3")
    dog = exchange.transport._watchdog
    assert dog.poll(time.monotonic() + 32.0) and not dog.poll(time.monotonic() + 34.0)
    with pytest.raises(RuntimeError) as error:
        exchange.transport.all_to_all([into], [sent], "bucket 4")
    return waits[0], str(error.value)


def test_a_communicator_waits_as_long_as_its_process_group(fakes: dict[str, str]) -> None:
    for waits, message in ranks.run(2, _as_long_as_the_group, fakes["newest"]):
        assert waits == 33.0 and "bucket 3 was not done after 33 s" in message


def _timeouts(rank: int, world: int) -> None:
    """Checks the time-outs of several groups, and of the group for messages between hosts."""
    cpu = torch.device("cpu")
    short = dist.new_group(timeout=datetime.timedelta(seconds=3))
    assert [process_group.timeout_of(g, cpu) for g in (dist.group.WORLD, short)] == [20.0, 3.0]
    assert process_group.timeout_of(short, torch.device("mps")) == 30 * 60, "no back end for it: torch's default"
    patch = pytest.MonkeyPatch()
    patch.setattr(factory, "backend", lambda group, device: "none")
    patch.setattr(collectives, "backend", lambda group, device: "none")
    assert process_group.timeout_of(collectives.control_communicator(short, cpu).group, cpu) == 3.0, (
        "words between hosts, too"
    )


def test_a_process_group_says_how_long_it_waits() -> None:
    ranks.run(2, _timeouts)


def _refused(rank: int, world: int) -> list[str]:
    """Returns the errors for transports that are not legal on a CPU."""
    said = []
    for transport in ("nccl", "mpi", "nccl" if rank == 0 else "torch"):
        with pytest.raises((ValueError, RuntimeError)) as error:
            torch_ext.parallelize(Given([4]), policy(), transport=transport)
        said.append(str(error.value))
    model = torch.nn.parallel.DistributedDataParallel(Given([4]))
    with pytest.raises(ValueError, match="transport='nccl' moves memory of GPUs, and the model is on cpu"):
        torch_ext.register_comm_hook(model, policy(), transport="nccl")
    return said


def test_a_transport_that_is_not_legal_here_is_refused_on_every_rank() -> None:
    for cpu, unknown, mixed in ranks.run(2, _refused):
        assert "transport='nccl' moves memory of GPUs, and the model is on cpu; legal is 'torch'" in cpu
        assert unknown == "transport is 'mpi'; legal are 'torch' and 'nccl'"
        assert "moves memory of GPUs" in mixed


class _On:
    """Has a device like a tensor, and nothing else."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)


@pytest.mark.parametrize(
    ("device", "why_not", "says"),
    [
        ("cuda:0", "", None),
        ("cuda:0", "no driver", "the model is on cuda:0, and no GPU here runs this library's operators: no driver"),
        ("meta", "", "the model is on meta; this library has operators for cpu, cuda"),
    ],
)
def test_a_model_is_where_the_operators_are(
    device: str, why_not: str, says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = cuda_library.About("a path", "13.0", "13.1", 1, "sm_90", why_not)
    monkeypatch.setattr(cuda_library, "about", lambda: about)
    named: Any = [("w", _On(device)), ("b", _On(device))]
    if says is None:
        parallelize_checks.check_devices(named)
        return
    with pytest.raises((ValueError, RuntimeError)) as error:
        parallelize_checks.check_devices(named)
    assert str(error.value) == says


def _described(rank: int, world: int, path: str) -> list[tuple[str, str]]:
    _use(path)
    return nccl.describe()


@pytest.mark.parametrize(
    ("variant", "says"),
    [
        ("newest", "2.28.9 ({path}), symmetric windows"),
        ("plain", "2.21.5 ({path}), no symmetric windows (2.27 has them)"),
        ("old", "none: NCCL 2.18.3, found as {path}, is too old; 2.19 is needed: install one "),
        ("absent", "none: no NCCL was found ({path}: cannot open shared object file"),
    ],
)
def test_info_says_what_was_found_or_why_nothing(fakes: dict[str, str], variant: str, says: str) -> None:
    path = fakes.get(variant, "/no/libnccl.so.2")
    ((found,),) = ranks.run(1, _described, path)
    assert found[0] == "NCCL" and found[1].startswith(says.format(path=path))


# -- all-gathers with a communicator of their own (create_all_gather_group) --------------------------------------------


def _gathers_apart(patch: pytest.MonkeyPatch, transport: str) -> None:
    """Makes every communicator have a second one for all-gathers; `streamed.trained` has a policy without it."""
    over = factory.make_communicator
    for module in (parallelize, ddp_connection):
        patch.setattr(module, "make_communicator", lambda group, device, *_: over(group, device, transport, True))


def _trained(rank: int, world: int, transport: str, path: str, strategy: str) -> dict[str, Any]:
    """Trains with separate communicators; the weights must have gloo's bits. Returns the races, by dtypes."""
    _use(path)
    found: dict[str, Any] = {}
    streams = FakeStreams()
    for name, dtypes in streamed.DTYPES.items():
        expected = streamed.trained(rank, strategy, dtypes)
        with pytest.MonkeyPatch.context() as patch, happens_before.pretended(streams):
            _note_accesses(streams, patch)
            _gathers_apart(patch, transport)
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
def test_a_training_over_two_communicators_has_the_bits_of_gloo(fakes: dict[str, str], strategy: str) -> None:
    (found,) = ranks.run(1, _trained, "nccl", fakes["newest"], strategy, limit=90.0)
    assert not any(found.values()), found


def _order(rank: int, world: int, path: str, transport: str) -> list[bool]:
    """Returns whether a gather that is started after a reduction waits for it: without and with an own communicator."""
    _use(path)
    found = []
    for apart in (False, True):
        streams = FakeStreams()
        with pytest.MonkeyPatch.context() as patch, happens_before.pretended(streams):
            _note_accesses(streams, patch)
            made: Any = factory.make_communicator(dist.group.WORLD, torch.device("cpu"), transport, apart)
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
def test_a_gather_does_not_follow_a_reduction_that_was_started_before_it(fakes: dict[str, str], transport: str) -> None:
    world = 2 if transport == "torch" else 1
    assert ranks.run(world, _order, fakes["newest"], transport) == [[True, False]] * world


def _without(rank: int, world: int, path: str) -> list[str]:
    """Removes the gathers' waits for the step that wrote their weights; returns the races."""
    _use(path)
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
        _note_accesses(streams, patch)
        patch.setattr(FakeStreams, "wait", deaf)
        _gathers_apart(patch, "nccl")
        streamed.trained(rank, "optim", streamed.DTYPES["fp32"])
    return streams.races


def test_a_gather_that_waits_for_nobody_is_noticed(fakes: dict[str, str]) -> None:
    (races,) = ranks.run(1, _without, fakes["newest"])
    assert any(race.startswith("weights of") and "does not follow" in race for race in races), races[:3]


def _transport(streams: FakeStreams) -> Any:
    assert dist.group.WORLD is not None
    return nccl_transport.transport_of(dist.group.WORLD, torch.device("cpu"), streams, True)


def _hangs(rank: int, world: int, path: str) -> list[str]:
    """A gather that does not complete must be aborted, and reductions must then be rejected with its label."""
    _use(path)
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


def test_a_gather_that_hangs_takes_the_reductions_with_it(fakes: dict[str, str]) -> None:
    ((of_reduction, of_gather),) = ranks.run(1, _hangs, fakes["newest"])
    assert "gradients of bucket 0" in of_reduction and "weights of bucket 4" in of_gather
    for text in (of_reduction, of_gather):
        assert "weights of bucket 3 was not done after" in text


def _second_refused(rank: int, world: int, path: str) -> str:
    """NCCL creates the first communicator and rejects the second. Returns the error."""
    _use(path)
    made = nccl.unique_id
    ids = iter(range(2))
    patch = pytest.MonkeyPatch()
    patch.setattr(nccl, "unique_id", lambda: (next(ids), made())[1])
    pretended = ctypes.CDLL(path)
    number = int(made()[3:].rstrip(b"\0")) + 2  # the id of the second communicator
    pretended.fake_nccl_init_error(2)
    pretended.fake_nccl_errors_of(number)
    whole = torch.zeros(256, dtype=torch.uint8)
    with pytest.raises(RuntimeError) as error:
        _transport(FakeStreams()).all_gather([whole], 0, "weights of bucket 0")
    counts = (ctypes.c_int * 6)()
    pretended.fake_nccl_counts(counts)
    assert counts[0] == 1, "the first was aborted"
    return str(error.value)


def test_a_second_communicator_that_is_refused_is_an_error_and_leaves_nothing(fakes: dict[str, str]) -> None:
    (said,) = ranks.run(1, _second_refused, fakes["newest"])
    assert "making the gathers' communicator on rank 0 of 1: NCCL says: unhandled system error" in said


def test_a_process_ends_with_both_still_there(fakes: dict[str, str], tmp_path: pathlib.Path) -> None:
    """A failure means that the process crashes or prints errors at exit, with both communicators open."""
    code = """
import sys, torch, torch.distributed as dist
import test_nccl
from happens_before import FakeStreams
test_nccl._use(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=0, world_size=1)
transport = test_nccl._transport(FakeStreams())
whole = torch.zeros(256, dtype=torch.uint8)
transport.all_gather([whole], 0, "weights")
transport.all_to_all([torch.zeros_like(whole)], [whole], "gradients")
if sys.argv[3] == "destroyed":
    dist.destroy_process_group()
"""
    here = [str(pathlib.Path(__file__).parent), *sys.path, os.getcwd()]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in here if p)}
    for way in ("just ends", "destroyed"):
        command = [sys.executable, "-c", code, fakes["newest"], str(tmp_path / way), way]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
        assert ran.returncode == 0 and not ran.stderr, ran.stderr


def _groups(rank: int, world: int) -> None:
    """A group has one gather group, with its ranks and its time-out; a second request returns the same."""
    halves = [dist.new_group([0, 2], datetime.timedelta(seconds=33)), dist.new_group([1, 3])]
    mine = halves[rank % 2]
    made = gather_group.gather_group_of(mine, torch.device("cpu"))
    assert made is not mine and gather_group.gather_group_of(mine, torch.device("cpu")) is made
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


def _differ(rank: int, world: int) -> str:
    with pytest.raises(RuntimeError) as error:
        torch_ext.parallelize(Given([4]), policy(create_all_gather_group=rank == 1))
    return str(error.value)


def test_ranks_that_differ_in_it_are_told() -> None:
    for said in ranks.run(2, _differ):
        assert "a group for all-gathers" in said
