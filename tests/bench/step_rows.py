"""The benchmark's rows about steps, and ROWS, the table of all rows. A row times its contenders in one interleaved run
and adds the ratios as figures with their targets."""

import statistics
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from bench import (
    backward_rows,
    busy_core,
    extras_rows,
    muon_rows,
    optimizer_configs,
    payload_rows,
    publish_rows,
    resident_memory,
    small_rows,
    state_rows,
    timing,
    workload,
)
from bench import peers as bench_peers
from bench.background_load import BackgroundLoad
from bench.figures import Bar, Point
from bench.l1 import InCache
from bench.optimizer_configs import CONFIGURATIONS, Configuration, Stepper
from bench.row import Bench
from bench.timing import Spread

# -- wall: the step's share of the bound. The bound is the time of memory traffic alone or, if that is longer, of the
# kernel in the first-level cache on as many threads at once -----------------------------------------------------------

_WALL_BARS = {"avx2": Bar(0.80, 0.92), "avx512": Bar(0.85, 0.95), "avx512bf16": Bar(0.85, 0.95)}
ISAS = tuple(_WALL_BARS)
# The target of "8bit" with AVX-512 on two threads, in ns per parameter. It applies only if the step is bound by the
# kernel, not by the memory.
_NS_8BIT, _NS_8BIT_THREADS, _NS_8BIT_ISAS = Bar(0.45, 0.33, lower_is_better=True), 2, ("avx512", "avx512bf16")


def wall(bench: Bench) -> None:
    """Adds the share of the bound for each configuration and instruction set."""
    present = [isa for isa in bench.isas if optimizer_configs.has_isa(isa)]
    for isa in bench.isas:
        if isa not in present:
            bench.skip("wall", isa, "this processor does not have it, or the library was not built for it")
    if not present:
        return
    with optimizer_configs.default_isa(), BackgroundLoad(bench.threads - 1, bench.seed) as beside:
        for configuration in CONFIGURATIONS.values():
            _wall_of(bench, configuration, present, beside)


def _wall_of(bench: Bench, configuration: Configuration, isas: list[str], beside: BackgroundLoad) -> None:
    training = optimizer_configs.ours(configuration, bench.flat, bench.seed)
    cached = {isa: InCache(configuration, bench.seed, partial(beside.running, configuration.name, isa)) for isa in isas}

    def under(isa: str, step: Callable[[], None]) -> Callable[[], None]:
        def selected() -> None:
            optimizer_configs.select_isa(isa)
            step()

        return selected

    contenders: dict[str, Callable[[], object]] = {"wall": optimizer_configs.wall(configuration.traffic, bench.params)}
    for isa in isas:
        contenders[isa] = under(isa, training.step)
        contenders[f"{isa}, in L1"] = under(isa, cached[isa].step)
    times = bench.run(f"wall, {configuration.name}", contenders, bench.rounds)

    scale = 1e9 / bench.params
    for isa in isas:
        in_l1 = [found.together / bench.threads for found in cached[isa].found[-bench.rounds :]]
        ours = [seconds * scale for seconds in times[isa]]
        bounds = [max(seconds * scale, ns) for seconds, ns in zip(times["wall"], in_l1, strict=True)]
        of_bound = timing.spread([bound / own for bound, own in zip(bounds, ours, strict=True)])
        of_wall = timing.ratio(times, "wall", isa).median
        ns, wall_ns = statistics.median(ours), statistics.median(times["wall"]) * scale
        l1_ns, alone = statistics.median(in_l1), statistics.median(found.alone for found in cached[isa].found)
        beside_it = {
            "ns": ns,
            "wall ns": wall_ns,
            "L1 ns": l1_ns,
            "one thread alone": alone / bench.threads,
            "of the wall": of_wall,
        }
        bench.add("wall", f"{configuration.name}, {isa}: share of the bound", of_bound, _WALL_BARS.get(isa), beside_it)
        if configuration.name == "8bit" and isa in _NS_8BIT_ISAS:
            bar = _NS_8BIT if bench.threads == _NS_8BIT_THREADS and l1_ns > wall_ns else None
            bench.add("wall", f"8bit, {isa}: ns per parameter", timing.spread(ours), bar)


# -- gpt2: many tensors against one tensor of their size ---------------------------------------------------------------


def gpt2(bench: Bench) -> None:
    for configuration in CONFIGURATIONS.values():
        _gpt2_of(bench, configuration)


def _gpt2_of(bench: Bench, configuration: Configuration) -> None:
    total = workload.numel(bench.model)
    model = optimizer_configs.ours(configuration, bench.model, bench.seed)
    flat = optimizer_configs.ours(configuration, [(total,)], bench.seed)
    times = bench.run(f"gpt2, {configuration.name}", {"flat": flat.step, "model": model.step}, bench.rounds)
    what = f"{configuration.name}: {len(bench.model)} tensors, speed relative to one"
    ns = statistics.median(times["model"]) * 1e9 / total
    bench.add("gpt2", what, timing.ratio(times, "flat", "model"), Bar(0.95, 0.99), {"ns": ns})


# -- peers: the steps of other optimizers on a flat tensor -------------------------------------------------------------


class Peer(NamedTuple):
    """A peer, and the configuration of ours that does the same."""

    what: str
    make: Callable[..., Stepper]  # from shapes and a seed
    ours: str  # the configuration of ours that it is compared with
    bar: Bar


PEERS = (
    Peer("torch fused, fp32", partial(bench_peers.torch_fused, dtype=torch.float32), "fp32", Bar(0.97, 1.03)),
    Peer("mixed recipe around torch fused", bench_peers.MixedRecipe, "bf16", Bar(2.0, 3.0)),
    Peer("mixed recipe in one pass, torch.compile", bench_peers.Compiled, "bf16", Bar(1.3, 1.7)),
    Peer(
        "torch fused, all bf16, no master",
        partial(bench_peers.torch_fused, dtype=torch.bfloat16),
        "8bit",
        Bar(1.5, 3.0),
    ),
    Peer("DeepSpeed CPUAdam, fp32 states, no master", bench_peers.deepspeed, "bf16_remainder", Bar(1.0, 1.3)),
)


def peers(bench: Bench) -> None:
    contenders: dict[str, Stepper] = {}
    for peer in PEERS:
        try:
            contenders[peer.what] = peer.make(bench.flat, seed=bench.seed)
        except bench_peers.Unavailable as why:
            bench.skip("peers", peer.what, why)
        if peer.ours not in contenders:
            contenders[peer.ours] = optimizer_configs.ours(CONFIGURATIONS[peer.ours], bench.flat, bench.seed)
    times = bench.run("peers", {name: c.step for name, c in contenders.items()}, bench.rounds)
    for peer in PEERS:
        if peer.what in contenders:
            what = f"{peer.what} / ours ({peer.ours})"
            bench.add("peers", what, timing.ratio(times, peer.what, peer.ours), peer.bar)
    for name, contender in contenders.items():
        ns = statistics.median(times[name]) * 1e9 / bench.params
        size = optimizer_configs.resident(contender, bench.params)
        bench.findings.points.append(Point(name, size, ns, name in CONFIGURATIONS))


# -- neighbour: the longest of many steps while another process keeps one core busy ------------------------------------

_NEIGHBOUR_STEPS = 50


def neighbour(bench: Bench) -> None:
    shapes = {"one tensor": bench.flat, f"{len(bench.model)} tensors": bench.model}
    contenders: dict[str, Callable[[], object]] = {}
    for what, each in shapes.items():
        contenders[f"bf16, {what}"] = optimizer_configs.ours(CONFIGURATIONS["bf16"], each, bench.seed).step
        contenders[f"torch fused fp32, {what}"] = bench_peers.torch_fused(
            each, seed=bench.seed, dtype=torch.float32
        ).step
    with busy_core.busy():
        times = bench.run("neighbour", contenders, _NEIGHBOUR_STEPS)
    for who in contenders:
        bar = Bar(3, 1.5, lower_is_better=True) if who.startswith("bf16,") else None
        beside = {"median ms": statistics.median(times[who]) * 1e3}
        worst = timing.worst(times, who)
        bench.add("neighbour", f"{who}: longest of {_NEIGHBOUR_STEPS} steps / median", worst, bar, beside)


# -- memory ------------------------------------------------------------------------------------------------------------

_MEMORY_BARS = {"bf16": Bar(12.1, 12.0, True), "bf16_remainder": Bar(10.1, 10.0, True), "8bit": Bar(8.1, 8.02, True)}


def memory(bench: Bench) -> None:
    try:
        found = resident_memory.measure(list(_MEMORY_BARS), bench.flat, bench.seed, bench.threads)
    except RuntimeError as failure:
        bench.skip("memory", "resident bytes per parameter", failure)
        return
    for name, bar in _MEMORY_BARS.items():
        storage = round(found[name].storage, 2)  # as the targets are; the step count's 4 bytes per tensor do not show
        beside = {"peak RSS": found[name].peak_rss}
        bench.add("memory", f"{name}: resident bytes per parameter", Spread(*[storage] * 3), bar, beside)


_STEPS = (wall, gpt2, peers, small_rows.small, neighbour, memory)
_STATE = (state_rows.external, state_rows.offload, state_rows.host, state_rows.checkpoint)
_BACKWARD = (backward_rows.gradients, backward_rows.release)
_PUBLISH = (publish_rows.publisher, publish_rows.deltas, payload_rows.payload)
_EXTRAS = (extras_rows.ema, extras_rows.health)
_OTHERS = (*_BACKWARD, *_PUBLISH, *_EXTRAS, muon_rows.muon)
ROWS: dict[str, Callable[[Bench], None]] = {row.__name__: row for row in (*_STEPS, *_STATE, *_OTHERS)}
