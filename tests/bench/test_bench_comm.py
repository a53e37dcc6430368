"""Tests python tests/bench comm with small sizes: every row has its figures, links have the stated speed, and no
process or namespace is left behind."""

import contextlib
import io
import json
import math
import multiprocessing
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import time
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from bench import __main__ as command
from bench.comm import comm_rows, launcher, networks
from bench.comm.comm_rows import ROWS, Versus
from bench.comm.contenders import CONTENDERS, ONE_RANK, OURS, PEERS, QUICK, Size, Task
from bench.comm.launcher import Answers
from bench.comm.networks import LINKS, Place, Unavailable, network
from bench.comm.rank import Answer, Job, Question
from bench.cost.measured_cost import STRATEGIES

BENCH = pathlib.Path(os.path.abspath(__file__)).parent


class Ran(NamedTuple):
    """The results of one run of the benchmark."""

    text: str  # what it printed
    found: dict[str, Any]  # its JSON file


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Runs the benchmark once, with --quick."""
    file = tmp_path_factory.mktemp("bench") / "comm.json"
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        assert command.main(["comm", "--quick", "--limit", "120", "--json", str(file)]) == 0
    return Ran(output.getvalue(), json.loads(file.read_text()))


def test_every_comparison_has_its_figure(ran: Ran) -> None:
    assert ran.found["skips"] == []
    figures = [(f["row"], f["what"]) for f in ran.found["figures"]]
    assert len(figures) == sum(len(row.versus) for row in ROWS.values())
    for name, row in ROWS.items():
        for versus in row.versus:
            assert any(r == name and what.startswith(f"{name}: {versus.ours}") for r, what in figures)


def test_figures_are_finite_and_printed(ran: Ran) -> None:
    lines = ran.text.splitlines()
    for figure in ran.found["figures"]:
        numbers = [figure["least"], figure["median"], figure["most"], *figure["beside"].values()]
        assert all(map(math.isfinite, numbers)), figure
        assert 0 <= figure["least"] <= figure["median"] <= figure["most"], figure
        assert any(line.startswith(figure["what"]) and line.endswith(figure["verdict"]) for line in lines)
    assert lines[-1].endswith("; 0 skipped")
    assert "no claims" in ran.text.split("verdict")[0] and "load before" in ran.text


def figure(ran: Ran, what: str) -> dict[str, Any]:
    """Returns the only figure whose name begins with `what`."""
    (found,) = (f for f in ran.found["figures"] if f["what"].startswith(what))
    return found


def test_figures_follow_from_the_seconds(ran: Ran) -> None:
    seconds = ran.found["seconds"]["loopback, N = 2"]
    pairs = zip(seconds["optim bf16"], seconds["ZeRO on DDP bf16"], strict=True)
    assert figure(ran, "zero: ")["median"] == statistics.median(ours / theirs for ours, theirs in pairs)
    slept = ran.found["seconds"]["loopback, N = 2, 0.015 s slept"]
    assert min(min(times) for times in slept.values()) > 0.015


def test_bytes_are_those_of_the_wire(ran: Ran) -> None:
    """The interface counts the messages and little more. With this tiny model the reports, messages of the exchange
    that are not gradients, are a visible part."""
    for name in ("no_shard bf16", "no_shard fp8"):
        beside = figure(ran, f"bytes: {name} /")["beside"]
        if LOOPBACK_IS_OURS:
            assert beside["wire_bytes() MB"] < beside["MB"] < 1.2 * beside["wire_bytes() MB"]
    if LOOPBACK_IS_OURS:
        assert 0.5 < figure(ran, "bytes: no_shard bf16 /")["beside"]["ratio"] < 0.55


def test_errors_are_as_small_as_asked(ran: Ran) -> None:
    """Errors are as meaningful in a small run as in a large one, unlike times."""
    assert {f["verdict"] for f in ran.found["figures"] if f["row"] == "accuracy"} == {"goal"}
    assert 1e-3 < figure(ran, "accuracy: optim, 16")["beside"]["DDP bf16, 16 micro-batches, error"] < 1e-2


# -- networks ----------------------------------------------------------------------------------------------------------


def possible(link: str) -> str:
    """Returns why this network is not possible on this machine; "" if it is."""
    try:
        with network(link, 2) as places:
            return "" if places[0].command else "no namespaces"
    except Unavailable as why:
        return str(why)


LOOPBACK_IS_OURS = not possible("loopback")
WHY_NO_LINKS = possible("1 Gbit/s")
needs_links = pytest.mark.skipif(bool(WHY_NO_LINKS), reason=WHY_NO_LINKS)


def namespaces(pid: int) -> list[str]:
    """Returns the network namespaces that a benchmark process has created."""
    if (ip := networks.tool("ip")) is None:
        return []
    listed = subprocess.run([ip, "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if line.startswith(f"torch_ext-{pid}-")]


_RECEIVE = """
import socket
server = socket.create_server(("0.0.0.0", 5000))
print("listening", flush=True)
connection, _ = server.accept()
while connection.recv(1 << 20):
    pass
connection.send(b"all")
"""
_SEND = """
import socket, time
for _ in range(100):
    try:
        connection = socket.create_connection(("10.0.0.1", 5000))
        break
    except OSError:
        time.sleep(0.05)
begin = time.perf_counter()
connection.sendall(bytes(40_000_000))
connection.shutdown(socket.SHUT_WR)
connection.recv(3)
print(40e6 * 8 / (time.perf_counter() - begin))
"""


@needs_links
def test_a_link_is_as_fast_as_it_says() -> None:
    with network("1 Gbit/s", 2) as (one, other):
        receiver = subprocess.Popen([*one.command, sys.executable, "-c", _RECEIVE])
        try:
            run = subprocess.run(
                [*other.command, sys.executable, "-c", _SEND], capture_output=True, text=True, timeout=30
            )
        finally:
            receiver.kill()
            receiver.wait()
        counted = subprocess.run([*other.command, "cat", "/proc/net/dev"], capture_output=True, text=True).stdout
    assert 0.3e9 < float(run.stdout) < 1.02e9, run.stderr  # may be slower on a busy machine, but not faster
    sent = next(int(line.split()[9]) for line in counted.splitlines() if line.strip().startswith("eth0"))
    assert 40e6 < sent < 43e6


@needs_links
@pytest.mark.parametrize("link", LINKS)
def test_no_namespace_is_left(link: str) -> None:
    before = namespaces(os.getpid())
    with pytest.raises(ZeroDivisionError), network(link, 2), network(link, 3) as places:
        assert len(set(places)) == (1 if link == "loopback" else 3)
        assert len(namespaces(os.getpid())) == len(before) + (2 if link == "loopback" else 3 + 4)
        raise ZeroDivisionError
    assert namespaces(os.getpid()) == before


@needs_links
def test_what_was_begun_is_removed_where_the_rest_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    call = networks._call

    def failing(tool: str, arguments: str) -> None:
        call(tool, arguments.replace("burst", "burst_no_such"))

    monkeypatch.setattr(networks, "_call", failing)
    before = namespaces(os.getpid())
    with pytest.raises(Unavailable, match="tc -n .*burst_no_such.* failed .*CAP_NET_ADMIN"), network("1 Gbit/s", 2):
        pass
    assert namespaces(os.getpid()) == before


def test_without_iproute2_or_root_links_say_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(networks.os, "geteuid", lambda: 1000)
        patch.setattr(networks, "tool", lambda name: name)
        with pytest.raises(Unavailable, match="run as root"), network("1 Gbit/s", 2):
            pass
    monkeypatch.setattr(networks, "tool", lambda name: None)
    with pytest.raises(Unavailable, match="no ip and no tc here: install iproute2"), network("10 Gbit/s", 2):
        pass
    with network("loopback", 2) as places:  # the machine's own loopback, without a namespace
        assert places == [Place((), "lo", True)] * 2


def gone(pid: int) -> bool:
    """Whether a process ends within 30 seconds. A rank that still imports torch checks its input only afterwards."""
    for _ in range(600):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def children(pid: int) -> list[int]:
    return [int(child) for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_ranks_and_namespaces_end_with_the_bench(number: signal.Signals) -> None:
    """The ranks end even if the benchmark is killed; only its namespaces are left then."""
    arguments = [sys.executable, str(BENCH), "comm", "--rows", "loopback", "--rounds", "1000"]
    bench = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        ranks: list[int] = []
        for _ in range(600):
            ranks = [c for c in children(bench.pid) if "bench.comm.rank" in command_line(c)]
            if len(ranks) == 2:
                break
            time.sleep(0.1)
        assert len(ranks) == 2
        bench.send_signal(number)
        bench.wait(20)
        assert all(map(gone, ranks))
        if number != signal.SIGKILL:
            assert not namespaces(bench.pid)
    finally:
        bench.kill()
        bench.wait()
        for name in namespaces(bench.pid):
            subprocess.run(["ip", "netns", "delete", name.split()[0]])


def command_line(pid: int) -> str:
    try:
        return pathlib.Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


# -- ranks -------------------------------------------------------------------------------------------------------------

HERE = [Place((), "lo", True)] * 2


def question(*jobs: Job) -> Question:
    return Question(2, "lo", QUICK, 0, list(jobs))


def test_a_rank_that_fails_has_the_last_word() -> None:
    """Its error is reported, and the answers to earlier jobs are kept."""
    answers, why = launcher.ask(question(Job("timing", ["alone"]), Job("nonsense", [])), HERE, 60)
    assert "rank 0 ended with status 1" in why or "rank 1 ended with status 1" in why
    assert "KeyError: 'nonsense'" in why
    assert [[list(a.seconds) for a in of_job] for of_job in answers] == [[["alone"], ["alone"]]]


def test_ranks_have_a_limit() -> None:
    begin = time.monotonic()
    answers, why = launcher.ask(question(Job("timing", ["alone"], 10**9)), HERE, 1.0)
    assert (answers, why) == ([], "not done after 1 s (--limit)")
    assert time.monotonic() - begin < 10


def test_what_ranks_found_is_of_the_slowest_and_of_one_rank() -> None:
    one = Answer({"a": [1.0, 2.0]}, {"a": [1.0, 3.0]}, {"a": [60.0, 80.0]}, {"a": 10}, {}, {"b": "no"})
    other = Answer({"a": [3.0, 1.0]}, {"a": [2.0, 4.0]}, {"a": [60.0, 82.0]}, {"a": 30}, {}, {"b": "no"})
    shared = comm_rows.found("loopback", [one, other], True)
    assert (shared.seconds, shared.cpu, shared.sent) == ({"a": [3.0, 2.0]}, {"a": [1.5, 3.5]}, {"a": [30.0, 40.5]})
    assert (shared.wire_bytes, shared.refused) == ({"a": 20}, {"b": "no"})
    assert comm_rows.found("1 Gbit/s", [one, other], False).sent == {"a": [60.0, 81.0]}


def test_exposed_is_against_the_best_of_the_peer() -> None:
    seconds = {"alone": [1.0, 1.0], "ours": [1.5, 1.3], "x": [2.0, 2.0], "y": [1.6, 1.6], "z": [3.0, 3.0]}
    f = comm_rows.Found("loopback", seconds, seconds, {}, {}, {}, {})
    value = ROWS["exposed"].value(f, Versus("ours", ("x", "y", "z", "not there")))
    assert value.theirs == "y"
    assert value.spread == pytest.approx((2 / 3, 0.5, 5 / 6))


REFUSED = [
    ({"no_shard bf16": "ValueError: not yet"}, "", "no_shard bf16: ValueError: not yet"),
    ({"DDP bf16": "RuntimeError: lost"}, "", "DDP bf16: RuntimeError: lost"),
    (None, "not done after 3 s (--limit)", "not done after 3 s (--limit)"),
]


@pytest.mark.parametrize(("refused", "why", "shown"), REFUSED, ids=["ours", "theirs", "no answer"])
def test_who_does_not_take_part_is_a_named_skip(
    refused: dict[str, str] | None, why: str, shown: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    def ask(question: Question, places: object, limit: float) -> Answers:
        there = [who for who in question.jobs[0].contenders if who not in (refused or {})]
        times = {who: [1.0] for who in there}
        answer = Answer(times, times, times, {}, {}, refused or {})
        return Answers([] if refused is None else [[answer, answer]], why)

    monkeypatch.setattr(launcher, "ask", ask)
    file, output = tmp_path / "comm.json", io.StringIO()
    with contextlib.redirect_stdout(output):
        assert command.main(["comm", "--quick", "--rows", "loopback", "--json", str(file)]) == 0
    takes_part = [{v.ours, *v.theirs} for v in ROWS["loopback"].versus]
    skipped = [shown for who in takes_part if refused is None or who & refused.keys()]
    assert [s["why"] for s in json.loads(file.read_text())["skips"]] == skipped != []
    assert f"SKIPPED: {shown}" in output.getvalue()


def test_without_links_their_rows_are_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(networks, "tool", lambda name: None)
    assert command.main(["comm", "--rows", "zero", "ten"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "SKIPPED" in line]
    assert len(lines) == 2 + len(ROWS["ten"].versus)
    assert all(line.endswith("install iproute2, and run as root") for line in lines)


def test_rows_name_contenders_that_are_there() -> None:
    timed = [who for row in ROWS.values() if row.kind == "timing" for who in row.contenders]
    assert [who for who in timed if who not in CONTENDERS] == []
    assert [who for who in OURS if who not in timed] == []
    assert [who for who in STRATEGIES if who not in timed] == [], "whose cost is predicted is compared, too"


# -- contenders --------------------------------------------------------------------------------------------------------

SMALL = Size(2, 24)


def _contend(rank: int, store: str, answers: Any) -> None:
    """Runs each contender on a rank and sends the weights after three steps and the gradients after one more backward.
    Also sends the gradients that the rank was given and the initial weights."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    group = dist.group.WORLD
    assert group is not None
    left: dict[str, tuple[list[Any], list[Any]]] = {}
    for name, make in CONTENDERS.items():
        loop = make(Task(SMALL, 0.0, group, 7))
        for _ in range(3):
            loop.step()
        loop.finish()
        weights = [_whole(p).float().tolist() for p in loop._model.parameters()]
        loop._model(loop._x).backward()
        grads = [_whole(p.grad).float().tolist() for p in loop._model.parameters() if p.grad is not None]
        left[name] = (weights, grads)
    first: Any = Task(SMALL, 0.0, group, 7).model(torch.float32).layers
    given = [grad.tolist() for grad in first[0].grads] * SMALL.layers
    start = [p.tolist() for p in Task(SMALL, 0.0, group, 7).model(torch.float32).parameters()]
    answers.put((rank, left, given, start))
    answers.close()
    answers.join_thread()
    os._exit(0)


def _bf16(values: list[Any]) -> torch.Tensor:
    return torch.tensor(values).bfloat16()


def _whole(t: Any) -> torch.Tensor:
    t = t.detach()
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def test_contenders_do_the_work(tmp_path: pathlib.Path) -> None:
    """Every contender but those without exchange gets the mean gradients. Weights are equal on all ranks, and have
    moved if the optimizer's step is part of the contender."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    ranks = [context.Process(target=_contend, args=(rank, str(tmp_path / "store"), answers)) for rank in range(2)]
    try:
        for process in ranks:
            process.start()
        found = {rank: rest for rank, *rest in (answers.get(timeout=240) for _ in ranks)}
    finally:
        for process in ranks:
            process.kill()
            process.join()
    (left, given, start), (other, other_given, _) = found[0], found[1]
    mean = [(torch.tensor(a) + torch.tensor(b)) / 2 for a, b in zip(given, other_given, strict=True)]
    for name in PEERS | OURS:
        weights, grads = left[name]
        assert weights == other[name][0], name
        steps = "optim" in name or "ZeRO" in name or "FSDP" in name
        moved = any(_bf16(a).ne(_bf16(b)).any() for a, b in zip(weights, start, strict=True))
        assert moved == steps, name
        if name != "alone" and not name.startswith("optim"):
            assert grads == other[name][1], name
            for grad, exact in zip(grads, mean, strict=True):
                error = (torch.tensor(grad) - exact).norm() / exact.norm()
                assert error < (0.05 if "fp8" in name else 0.005), name
    for name in ("alone", *ONE_RANK):
        assert left[name] != other[name], f"{name} exchanges nothing"


# -- options -----------------------------------------------------------------------------------------------------------

REFUSED_OPTIONS = [["--rows", "walls"], ["--rounds", "0"], ["--limit", "-1"], ["--json", "/nowhere/comm.json"]]


@pytest.mark.parametrize("arguments", REFUSED_OPTIONS, ids=" ".join)
def test_options_that_are_not_legal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(["comm", *arguments])
    assert arguments[0] in capsys.readouterr().err


def test_the_exchange_has_its_own_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        command.main(["comm", "--help"])
    shown = capsys.readouterr().out
    assert "--limit" in shown and "exposed" in shown and "--isa" not in shown
