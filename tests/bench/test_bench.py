"""Tests python tests/bench with small sizes: every row has its figures, the figures follow from the times, and peers
compute the same step."""

import contextlib
import io
import json
import math
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import time
from functools import partial, partialmethod
from typing import Any, NamedTuple

import pytest
import torch

from bench import __main__ as command
from bench import (
    busy_core,
    optimizer_configs,
    peers,
    plots,
    resident_memory,
    step_rows,
    timing,
    variant_rows,
    variant_worker,
    workload,
)
from bench.background_load import BackgroundLoad
from bench.figures import Bar, Findings
from bench.l1 import InCache
from bench.optimizer_configs import CONFIGURATIONS
from bench.row import Bench
from bench.step_rows import ISAS, PEERS, ROWS
from torch_ext.cli import info


class Ran(NamedTuple):
    """The results of one run of the benchmark."""

    text: str  # what it printed
    found: dict[str, Any]  # its JSON file
    picture: pathlib.Path


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Runs the benchmark once, with --quick."""
    folder = tmp_path_factory.mktemp("bench")
    output = io.StringIO()
    arguments = ["--quick", "--threads", "1", "--seed", "3", "--json", str(folder / "bench.json")]
    with contextlib.redirect_stdout(output):
        assert command.main([*arguments, "--pictures", str(folder / "pictures")]) == 0
    found = json.loads((folder / "bench.json").read_text())
    return Ran(output.getvalue(), found, folder / "pictures" / "bytes_against_time.png")


def test_every_row_has_its_figures(ran: Ran) -> None:
    """Every row has a figure, or a skip with its reason."""
    there = [f["what"] for f in ran.found["figures"]] + [s["what"] for s in ran.found["skips"]]
    assert {f["row"] for f in ran.found["figures"]} == set(ROWS)
    present = [isa for isa in ISAS if optimizer_configs.has_isa(isa)]
    wanted = [f"{name}, {isa}: share of the bound" for name in CONFIGURATIONS for isa in present]
    wanted += [isa for isa in ISAS if isa not in present]
    wanted += [f"{name}: 148 tensors, speed relative to one" for name in CONFIGURATIONS]
    wanted += [f"{name}: resident bytes per parameter" for name in ("bf16", "bf16_remainder", "8bit")]
    averages = [f"average in {kind}: step with it / wall" for kind in ("bf16", "24bit", "fp32")]
    wanted += [f"{name}, {average}" for name in CONFIGURATIONS for average in averages]
    wanted += [
        f"{name}: step that {does} / step" for name in CONFIGURATIONS for does in ("measures", "does not measure")
    ]
    wanted += [f"offload + onload, {what}: fraction of a plain copy" for what in ("one tensor", "148 tensors")]
    wanted += [f"{name}, dcp, {what}: peak memory / state" for name in ("bf16", "8bit") for what in ("save", "load")]
    assert [what for what in wanted if what not in there] == []
    assert [peer.what for peer in PEERS if not any(what.startswith(peer.what) for what in there)] == []


# What is said of figures that are a difference of two times: on a busy machine one round of it may be below zero.
DIFFERENCES = ("without a read of the weights", "over plain backward")


def test_figures_are_finite_and_between_their_extremes(ran: Ran) -> None:
    said = [figure["what"] for figure in ran.found["figures"]]
    assert all(any(of in what for what in said) for of in DIFFERENCES)
    for figure in ran.found["figures"]:
        numbers = [figure["least"], figure["median"], figure["most"], *figure["beside"].values()]
        assert all(map(math.isfinite, numbers)), figure
        assert figure["least"] <= figure["median"] <= figure["most"], figure
        assert figure["least"] > 0 or any(of in figure["what"] for of in DIFFERENCES), figure


def test_machine_and_settings_come_first(ran: Ran) -> None:
    assert set(ran.found) == {"machine", "options", "figures", "skips", "points", "seconds"}
    machine = ran.found["machine"]
    assert (machine["seed"], machine["threads"], machine["in use"]) == (3, 1, info.selected_isa())
    before_figures = ran.text.split("verdict")[0]
    for key in ("processor", "in use", "threads", "torch", "seed"):
        assert f"{machine[key]}" in before_figures
    assert "no claims" in before_figures


def test_everything_is_printed_and_counted(ran: Ran) -> None:
    lines = ran.text.splitlines()
    for figure in ran.found["figures"]:
        assert any(line.startswith(figure["what"]) and line.endswith(figure["verdict"]) for line in lines)
    for skip in ran.found["skips"]:
        assert any(line.startswith(skip["what"]) and line.endswith(skip["why"]) for line in lines)
    figures, skips = len(ran.found["figures"]), len(ran.found["skips"])
    (closing,) = (line for line in lines if line.endswith(" skipped"))
    assert closing.startswith(f"{figures} figures: ") and closing.endswith(f"; {skips} skipped")


def test_figures_follow_from_the_seconds(ran: Ran) -> None:
    def figure(what: str) -> float:
        (found,) = (f["median"] for f in ran.found["figures"] if f["what"] == what)
        return found

    seconds = ran.found["seconds"]

    def ratio(run: str, of: str, to: str) -> float:
        return statistics.median(a / b for a, b in zip(seconds[run][of], seconds[run][to], strict=True))

    assert figure("torch fused, fp32 / ours (fp32)") == ratio("peers", "torch fused, fp32", "fp32")
    assert figure("bf16: 148 tensors, speed relative to one") == ratio("gpt2, bf16", "flat", "model")
    steps = seconds["neighbour"]["bf16, 148 tensors"]
    assert len(steps) == 50
    assert figure("bf16, 148 tensors: longest of 50 steps / median") == max(steps) / statistics.median(steps)


def test_bytes_per_parameter(ran: Ran) -> None:
    sizes = {f["what"].split(":")[0]: f["median"] for f in ran.found["figures"] if f["row"] == "memory"}
    assert sizes == {"bf16": 12.0, "bf16_remainder": 10.01, "8bit": 8.02}
    points = {p["who"]: p["bytes_per_parameter"] for p in ran.found["points"]}
    assert points["fp32"] == pytest.approx(16, abs=0.01)
    assert points["torch fused, fp32"] == pytest.approx(16, abs=0.01)
    assert points["mixed recipe around torch fused"] == pytest.approx(20, abs=0.01)


def test_picture(ran: Ran) -> None:
    assert ran.picture.read_bytes().startswith(b"\x89PNG")
    assert str(ran.picture) in ran.text


# -- the parts ---------------------------------------------------------------------------------------------------------

VERDICTS = [
    (Bar(0.85, 0.95), 0.95, "goal"),
    (Bar(0.85, 0.95), 0.9499, "met"),
    (Bar(0.85, 0.95), 0.85, "met"),
    (Bar(0.85, 0.95), 0.8499, "below"),
    (Bar(3, 1.5, lower_is_better=True), 1.5, "goal"),
    (Bar(3, 1.5, lower_is_better=True), 1.51, "met"),
    (Bar(3, 1.5, lower_is_better=True), 3.0, "met"),
    (Bar(3, 1.5, lower_is_better=True), 3.01, "below"),
]


@pytest.mark.parametrize(("bar", "value", "verdict"), VERDICTS)
def test_verdict(bar: Bar, value: float, verdict: str) -> None:
    assert bar.verdict(value) == verdict


def test_contenders_take_turns() -> None:
    calls: list[str] = []
    contenders = {name: (lambda name=name: calls.append(name)) for name in "abc"}
    times = timing.interleave(contenders, 3)
    assert "".join(calls) == "aabbcc" + "abc" + "cba" + "abc"
    assert {name: len(seconds) for name, seconds in times.items()} == {"a": 3, "b": 3, "c": 3}


def test_ratios_are_taken_round_by_round() -> None:
    """A machine that becomes ten times slower during the run does not change the ratios."""
    times = {"theirs": [2.0, 20.0, 30.0], "ours": [1.0, 10.0, 10.0]}
    assert timing.ratio(times, "theirs", "ours") == (2.0, 2.0, 3.0)
    assert timing.worst({"x": [1.0, 2.0, 8.0]}, "x") == (4.0, 0.5, 4.0)


def test_an_isa_that_is_not_there_is_a_named_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_configs, "has_isa", lambda name: name != "avx2")
    findings = Findings()
    bench = Bench(1000, [(10,)], 1, 1, ["avx2", "base"], 0, findings)
    step_rows.wall(bench)
    assert [(skip.row, skip.what) for skip in findings.skips] == [("wall", "avx2")]
    assert {f.what for f in findings.figures} == {f"{name}, base: share of the bound" for name in CONFIGURATIONS}
    assert all(f.bar is None for f in findings.figures)


def test_the_isa_is_given_back() -> None:
    before = info.selected_isa()
    with pytest.raises(ZeroDivisionError), optimizer_configs.default_isa():
        optimizer_configs.select_isa("base")
        assert info.selected_isa() == "base"
        raise ZeroDivisionError
    assert info.selected_isa() == before


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_kernel_in_cache_is_the_step(name: str) -> None:
    """The steps that are timed through the C interface leave the same bits as that many steps of the optimizer."""
    cached = InCache(CONFIGURATIONS[name], seed=0)
    own = optimizer_configs.ours(CONFIGURATIONS[name], [(256,)], seed=0)
    cached.step()
    for _ in range(2001):  # one step more, which InCache makes to create the state
        own.step()
    for a, b in zip(cached.trainings[0].tensors(), own.tensors(), strict=True):
        # With fp32 masters, InCache's calls leave out the checksums of the weights.
        assert torch.equal(a, b) or (a.dtype == torch.int64 and name == "bf16")
    assert len(cached.found) == 1 and all(map(math.isfinite, cached.found[0]))


def ticks(pid: int) -> int:
    """Returns how many clock ticks a process has run for."""
    return sum(map(int, pathlib.Path(f"/proc/{pid}/stat").read_text().split()[13:15]))


def test_the_kernel_in_cache_is_timed_while_others_run_it() -> None:
    """The background processes run only when asked to. If one of them has ended, that is an error and nothing waits."""
    with BackgroundLoad(2, seed=0) as beside:
        cached = InCache(CONFIGURATIONS["8bit"], 0, partial(beside.running, "8bit", "base"))
        for _ in range(2):
            cached.step()
        assert all(found.together > 0 for found in cached.found)
        with beside.running("fp32", "base"):
            time.sleep(0.3)
        assert len(beside.calls) == 2 and min(beside.calls) > 10
        spent = [ticks(process.pid) for process in beside._processes]
        time.sleep(0.3)
        assert [ticks(process.pid) for process in beside._processes] == spent
        beside._processes[1].kill()
        with pytest.raises(RuntimeError, match="ended with status -9"):
            cached.step()


def test_gpt2_is_gpt2() -> None:
    shapes = workload.gpt2()
    assert (len(shapes), workload.numel(shapes)) == (148, 124_439_808)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_normal_and_of_several_magnitudes(dtype: torch.dtype) -> None:
    (p,) = workload.make([(2_000_003,)], dtype, seed=0)
    assert p.grad is not None and p.grad.dtype == dtype
    g = p.grad.float().abs()
    assert bool((g * g > torch.finfo(torch.float32).tiny).all()) and bool(p.ne(0).all())
    chunks = [float(chunk.mean()) for chunk in g.split(1 << 17)]
    assert max(chunks) > 50 * min(chunks)


def test_peers_take_the_step_that_ours_takes() -> None:
    """After 20 steps from one seed, master weights agree to a fiftieth of the distance that they moved. They are not
    equal, since our moments are bf16."""
    shapes = [(1000,), (7, 9)]
    start = [p.detach().float() for p in workload.make(shapes, torch.bfloat16, 5)]
    own = optimizer_configs.ours(CONFIGURATIONS["bf16"], shapes, 5)
    mixed, compiled = peers.MixedRecipe(shapes, 5), peers.Compiled(shapes, 5)  # Compiled() makes one step
    for _ in range(19):
        compiled.step()
    for _ in range(20):
        own.step()
        mixed.step()
    for i, (p, first) in enumerate(zip(own.params, start, strict=True)):
        master = own.optimizer.state[p]["master_param"]
        moved = (master - first).abs().mean()
        assert moved > 1e-3
        for theirs, weight in ((mixed.masters, mixed.model), (compiled.lists[4], compiled.lists[0])):
            assert (theirs[i] - master).abs().max() < moved / 50
            assert torch.equal(weight[i], theirs[i].bfloat16())


def test_a_peer_that_is_not_there_is_a_named_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(shapes: object, seed: int) -> Any:
        raise peers.Unavailable("not on this machine")

    monkeypatch.setattr(step_rows, "PEERS", (PEERS[0], PEERS[-1]._replace(make=absent)))
    findings = Findings()
    step_rows.peers(Bench(1000, [(10,)], 1, 1, [], 0, findings))
    assert [(skip.what, skip.why) for skip in findings.skips] == [(PEERS[-1].what, "not on this machine")]
    assert [f.what for f in findings.figures] == ["torch fused, fp32 / ours (fp32)"]


def test_memory_counts_what_is_resident() -> None:
    """With enough parameters the peak of the process is the storages and little more."""
    params = 8_000_000
    found = resident_memory.measure_here("8bit", [(params,)], seed=0)
    assert found.storage == pytest.approx(8 + 2 / 128 + 8 / 1024, abs=1e-4)
    assert found.storage - 0.05 < found.peak_rss < found.storage + 0.5


def gone(pid: int) -> bool:
    """Whether a process ends within five seconds."""
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_the_neighbour_is_busy_on_one_core_and_leaves() -> None:
    with pytest.raises(ZeroDivisionError), busy_core.busy() as pid:
        (core,) = os.sched_getaffinity(pid)
        assert core in os.sched_getaffinity(0)
        time.sleep(0.3)
        assert pathlib.Path(f"/proc/{pid}/stat").read_text().split()[2] == "R"
        raise ZeroDivisionError
    assert gone(pid)


def test_the_neighbour_leaves_when_we_are_killed() -> None:
    code = (
        "import os, runpy, signal, sys\n"
        "with runpy.run_path(sys.argv[1])['busy']() as pid:\n"  # without its package: importing torch takes seconds
        "    print(pid, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = [sys.executable, "-c", code, busy_core.__file__]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    assert run.returncode == -signal.SIGKILL
    assert gone(int(run.stdout))


# -- options -----------------------------------------------------------------------------------------------------------

REFUSED = [
    ["--rows", "walls"],
    ["--isa", "sse9"],
    ["--rounds", "0"],
    ["--params", "-1"],
    ["--threads", "x"],
    ["--json", "/nowhere/bench.json"],
]


@pytest.mark.parametrize("arguments", REFUSED, ids=" ".join)
def test_options_that_are_not_legal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main([*arguments])
    assert arguments[0] in capsys.readouterr().err


@pytest.mark.parametrize(("device", "row"), [("cpu", "many"), ("cuda", "deltas")])
def test_a_row_of_another_device(device: str, row: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--device", device, "--rows", row]) == 2
    assert f"--device {device} has no row {row}; wall, " in capsys.readouterr().out


def test_pictures_without_matplotlib_say_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="pip install matplotlib"):
        command.main(["--quick", "--pictures", str(tmp_path)])
    assert capsys.readouterr().out == ""


def test_quality_has_its_own_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        command.main(["--quality", "--help"])
    assert "--rows" not in capsys.readouterr().out
    with pytest.raises(SystemExit, match="0"):
        command.main(["--help"])
    shown = capsys.readouterr().out
    assert "--rows" in shown and "--quality" in shown


def test_variants_are_compared_in_processes_of_their_own(tmp_path: pathlib.Path) -> None:
    """Tested on the CPU, which ignores the CUDA library that each process is given."""
    for name in ("plain", "other"):
        (tmp_path / f"{name}.so").touch()
    findings = Findings()
    variant_rows.variants(Bench(4096, [], 3, 1, [], 0, findings), tmp_path, "cpu", names=["8bit"])
    assert [f.what.rpartition(": ")[2] for f in findings.figures] == [
        f"plain / {name}" for name in ("ordinary", "other", "plain")
    ]
    assert findings.figures[-1].value.median == 1.0
    assert all(f.beside["fraction of the copy bandwidth"] > 0 for f in findings.figures)


def test_variants_of_other_bits_are_an_error(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Other:
        def __init__(self, library: str, arguments: object) -> None:
            self._library = library

        def answer(self, line: str = "") -> str:
            return str(hash(self._library) if line == "bits" else 1.0)

        def end(self) -> None:
            pass

    for name in ("plain", "other"):
        (tmp_path / f"{name}.so").touch()
    monkeypatch.setattr(variant_rows, "Worker", Other)
    with pytest.raises(AssertionError, match="fp32: builds of other bits"):
        variant_rows.variants(Bench(4096, [], 3, 1, [], 0, Findings()), tmp_path, "cpu")


@pytest.mark.parametrize("fault", ["os._exit(3)", "time.sleep(1000)"], ids=["ends", "hangs"])
def test_a_variant_whose_process_is_lost_is_left_out(
    fault: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other builds are compared all the same; without the plain build nothing can be."""
    for name in ("bad", "other", "plain"):
        (tmp_path / f"{name}.so").touch()
    code = f"""
import os, sys, time
answers = 0
print("ready", flush=True)
for line in sys.stdin:
    answers += 1
    if answers == 2 and os.path.basename(os.environ["TORCH_EXT_CUDA_LIBRARY"]).startswith("bad"):
        {fault}
    print(1.5, flush=True)
"""
    (tmp_path / "fake").write_text(f"#!{sys.executable}\n{code}")
    (tmp_path / "fake").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "fake"))
    monkeypatch.setattr(variant_rows.Worker, "__init__", partialmethod(variant_rows.Worker.__init__, patience=2.0))
    findings = Findings()
    variant_rows.variants(Bench(4096, [], 3, 1, [], 0, findings), tmp_path, "cpu", names=["8bit"])
    assert [f.what.rpartition(" ")[2] for f in findings.figures] == ["ordinary", "other", "plain"]
    (skip,) = findings.skips
    assert skip.what.endswith("plain / bad") and "bad.so ended with status" in skip.why
    assert set(findings.times["variants 8bit"]) == {"ordinary", "other", "plain", "copy"}
    (tmp_path / "plain.so").rename(tmp_path / "bad_plain.so")
    monkeypatch.setattr(variant_rows, "PLAIN", "bad_plain")
    with pytest.raises(variant_rows.Lost, match="bad_plain.so ended with status"):
        variant_rows.variants(Bench(4096, [], 3, 1, [], 0, findings), tmp_path, "cpu", names=["8bit"])


def test_variants_without_the_plain_one_are_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=f"no plain.so in {tmp_path}"):
        variant_rows.libraries(tmp_path, "cpu")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_the_checksum_of_a_variant_sees_differences_that_cancel_in_a_sum(dtype: torch.dtype) -> None:
    tensor = torch.arange(64).to(dtype)
    changed = tensor.clone()
    words = changed.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize])
    words[3] += 1
    words[7] -= 1
    assert variant_worker.bits([tensor]) == variant_worker.bits([tensor.clone()])
    assert variant_worker.bits([tensor]) != variant_worker.bits([changed])
