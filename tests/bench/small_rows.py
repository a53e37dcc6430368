"""The benchmark's row about steps of tensors so small that almost no time is arithmetic."""

import statistics
from collections.abc import Callable

import torch

import torch_ext
from bench import library_time, optimizer_configs, other_ways, timing, workload
from bench import peers as bench_peers
from bench.figures import Bar
from bench.optimizer_configs import CONFIGURATIONS, Training
from bench.row import Bench
from bench.workload import Shapes

_SMALL: Shapes = [(64,)] * 1000
_STEPS = 10  # steps per timing: one step takes less than a millisecond


def small(bench: Bench) -> None:
    theirs = bench_peers.torch_fused(_SMALL, seed=bench.seed, dtype=torch.float32)
    own = optimizer_configs.ours(CONFIGURATIONS["fp32"], _SMALL, bench.seed)
    contenders: dict[str, Callable[[], object]] = {"torch fused": _several(theirs.step), "ours": _several(own.step)}
    times = bench.run("small", contenders, bench.rounds)
    us = {who: statistics.median(times[who]) / _STEPS / len(_SMALL) * 1e6 for who in contenders}
    beside = {"ours, us a tensor": us["ours"], "torch fused, us a tensor": us["torch fused"]}
    value = timing.ratio(times, "torch fused", "ours")
    bench.add("small", "1000 tensors of 64, fp32: torch fused / ours", value, Bar(2.5, 4.0), beside)
    shapes = workload.gpt2(2, 3, 2)
    for name in CONFIGURATIONS:
        _host_time(bench, name, shapes)
    _loops(bench, shapes)


def _several(step: Callable[[], object]) -> Callable[[], None]:
    """Returns a function that makes _STEPS steps."""

    def steps() -> None:
        for _ in range(_STEPS):
            step()

    return steps


def _host_time(bench: Bench, name: str, shapes: Shapes) -> None:
    """Times steps that repeat the one before, as most do; those that may not; and those through torch's dispatcher, as
    where torch_ext cannot call the library directly."""
    own = optimizer_configs.ours(CONFIGURATIONS[name], shapes, bench.seed)
    theirs = bench_peers.torch_fused(shapes, seed=bench.seed, dtype=torch.float32)
    in_library: list[float] = []
    steps: dict[str, Callable[[], object]] = {
        "torch fused": theirs.step,
        "dispatched": other_ways.dispatched(own.step),
        "not repeated": other_ways.not_repeated(own.step),
        "ours": own.step,
        "timed": other_ways.under(lambda: library_time.noting(in_library), own.step),
    }
    times = bench.run(f"small, {name}", {who: _several(step) for who, step in steps.items()}, bench.rounds)
    us = {who: statistics.median(times[who]) / _STEPS * 1e6 for who in ("ours", "torch fused")}
    beside = {f"us a step, {who}": each for who, each in us.items()}
    if in_library:
        beside["us of ours in C"] = statistics.median(in_library) * 1e6
    what = f"{name}: {len(shapes)} tensors of 2 to 16"
    ours = timing.ratio(times, "torch fused", "ours")
    bench.add("small", f"{what}: torch fused, fp32 / ours", ours, Bar(2, 4), beside)
    usual = timing.ratio(times, "not repeated", "ours")
    bench.add("small", f"{what}: not repeating the step before / repeating it", usual, Bar(1.2, 1.5))
    dispatched = timing.ratio(times, "dispatched", "not repeated")
    bench.add("small", f"{what}: through torch's dispatcher / past it", dispatched, Bar(1.05, 1.2))


# -- what training loops do around a step ------------------------------------------------------------------------------


def after_saving(training: Training) -> Callable[[], object]:
    training.step()
    training.optimizer.state_dict()
    return training.step


def clipping(training: Training) -> Callable[[], object]:
    """Clips by each library's recommended call."""
    ours = isinstance(training.optimizer, torch_ext.AdamW)

    def step() -> None:
        if ours:
            torch_ext.clip_grad_norm_(training.optimizer, 1.0)
        else:
            torch.nn.utils.clip_grad_norm_(training.params, 1.0)
        training.step()

    return step


_LOOPS: dict[str, Callable[[Training], Callable[[], object]]] = {
    "after state_dict()": after_saving,
    "with a default device": lambda training: other_ways.under(lambda: torch.device("cpu"), training.step),
    "with a clip": clipping,
}


def _loops(bench: Bench, shapes: Shapes) -> None:
    for what, loop in _LOOPS.items():
        own = loop(optimizer_configs.ours(CONFIGURATIONS["bf16"], shapes, bench.seed))
        theirs = loop(bench_peers.torch_fused(shapes, seed=bench.seed, dtype=torch.bfloat16))
        steps = {"torch fused": _several(theirs), "ours": _several(own)}
        times = bench.run(f"small, {what}", steps, bench.rounds)
        beside = {f"us a step, {who}": statistics.median(times[who]) / _STEPS * 1e6 for who in steps}
        value = timing.ratio(times, "torch fused", "ours")
        bench.add("small", f"bf16, {len(shapes)} tensors, {what}: torch fused / ours", value, Bar(2, 4), beside)
