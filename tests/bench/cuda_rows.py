"""python tests/bench --device cuda: compares the step on a GPU with a copy of as many bytes, and with torch's
optimizers. The parts of a row are measured in another process (restarts.py), since a kernel that fails leaves its
process without a device."""

import argparse
import json
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from bench import (
    bench_report,
    gpu_muon_rows,
    gpu_peer_rows,
    optimizer_configs,
    other_ways,
    peers,
    restarts,
    small_rows,
    workload,
)
from bench.figures import Bar, Findings
from bench.gpu_work import copy_of, waited
from bench.optimizer_configs import CONFIGURATIONS, Stepper
from bench.row import Bench
from bench.timing import Spread, ratio, spread
from bench.variant_rows import variants
from bench.workload import Shapes
from torch_ext.optim.clip_grad import clip_grad_norm_

_DEVICE = "cuda:0"
_PARAMS, _ROUNDS = 1_000_000_000, 20
_QUICK_PARAMS, _QUICK_ROUNDS = 1 << 20, 3
_VARIANT_PARAMS = 1 << 28  # fewer, since every build keeps its own parameters at the same time
_HOST_TURNS, _HOST_STEPS = 10, 20


def why_not() -> str:
    """Returns why nothing can be measured; an empty string if it can."""
    if torch.cuda.is_available():
        return ""
    return "this torch is built without CUDA" if not torch.backends.cuda.is_built() else "torch finds no GPU"


def run(options: argparse.Namespace) -> int:
    """Measures the parts of all rows in another process, and prints their figures as they come. Returns 1 if there is
    no GPU or if a part failed; the other parts are measured all the same."""
    if reason := why_not():
        print(f"bench --device cuda: {reason}")
        return 1
    folder = str(options.variants.absolute()) if options.variants else ""
    keys = ("params", "rounds", "threads", "seed", "quick", "rows")
    settings = {key: getattr(options, key) for key in keys} | {"variants": folder}
    measured = bench(settings, Findings())
    if options.quick:
        print("quick: small sizes, these figures are no claims")
    print(
        f"{measured.params:,} parameters in one tensor, {measured.rounds} rounds\n\n{bench_report.header()}", flush=True
    )
    shown = {"device": "cuda", "params": measured.params, "rounds": measured.rounds, "quick": options.quick}

    def write(progress: restarts.Progress) -> None:
        if options.json:
            found = bench_report.as_json(progress.facts, shown, progress.findings)
            text = json.dumps(found | {"failures": progress.failures, "processes": progress.processes}, indent=1)
            new = options.json.with_name(options.json.name + ".new")
            new.write_text(text + "\n")
            new.replace(options.json)  # whoever is killed leaves the old file or the new one

    progress = restarts.Restarts(__name__, settings, write).run()
    print(bench_report.closing(progress.findings))
    return int(bool(progress.failures))


# -- what measuring_process asks of this module ----------------------------------------------------------------------


def parts(settings: Mapping[str, Any]) -> dict[str, Callable[[Bench], None]]:
    if folder := settings["variants"]:
        return {
            f"variants {name}": partial(variants, folder=pathlib.Path(folder), device=_DEVICE, names=[name])
            for name in CONFIGURATIONS
        }
    rows = {row: ROWS[row] for row in settings["rows"]}
    return {f"{row} {name}": partial(measure, name=name) for row, (measure, names) in rows.items() for name in names}


def bench(settings: Mapping[str, Any], findings: Findings) -> Bench:
    quick = settings["quick"]
    return Bench(
        params=settings["params"] or (_QUICK_PARAMS if quick else _VARIANT_PARAMS if settings["variants"] else _PARAMS),
        model=workload.gpt2(16, 503, 32) if quick else workload.gpt2(),
        rounds=settings["rounds"] or (_QUICK_ROUNDS if quick else _ROUNDS),
        threads=settings["threads"],
        isas=[],
        seed=settings["seed"],
        findings=findings,
    )


def facts(settings: Mapping[str, Any]) -> dict[str, Any]:
    found = bench_report.machine(settings["threads"], settings["seed"]) | _device_facts()
    print(bench_report.facts(found), flush=True)
    return found


def why_dead() -> str:
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return _first_line(error)
    return ""


def clear() -> None:
    torch.cuda.empty_cache()


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")


def _device_facts() -> dict[str, Any]:
    major, minor = torch.cuda.get_device_capability(_DEVICE)
    return {
        "GPU": torch.cuda.get_device_name(_DEVICE),
        "architecture": f"sm_{major}{minor}",
        "CUDA": torch.version.cuda,
        "memory": f"{torch.cuda.get_device_properties(_DEVICE).total_memory >> 30} GiB",
    }


def _wall(bench: Bench, name: str) -> None:
    """Compares the step on one flat tensor with a copy of as many bytes."""
    configuration = CONFIGURATIONS[name]
    what = f"{name} ({configuration.about}): fraction of the copy bandwidth"
    try:
        ours = optimizer_configs.ours(configuration, bench.flat, bench.seed, _DEVICE)
        contenders = {
            "copy": waited(copy_of(configuration.traffic, bench.params, _DEVICE), 3),
            "ours": waited(ours.step, 3),
        }
        times = bench.run(f"wall {name}", contenders, bench.rounds)
    except torch.cuda.OutOfMemoryError as error:
        bench.skip("wall", what, _first_line(error))
        return
    beside = {
        "ns per parameter": statistics.median(times["ours"]) / 3 / bench.params * 1e9,
        "copy TB/s": 3 * configuration.traffic * bench.params / statistics.median(times["copy"]) / 1e12,
        "bytes per parameter": optimizer_configs.resident(ours, bench.params),
    }
    bench.add("wall", what, ratio(times, "copy", "ours"), Bar(0.85, 0.93), beside)


def _many(bench: Bench, name: str) -> None:
    """Compares the step of GPT-2's tensors with that of one tensor with as many elements."""
    flat: Shapes = [(workload.numel(bench.model),)]
    made = {
        "148 tensors": optimizer_configs.ours(CONFIGURATIONS[name], bench.model, bench.seed, _DEVICE),
        "one tensor": optimizer_configs.ours(CONFIGURATIONS[name], flat, bench.seed, _DEVICE),
    }
    times = bench.run(f"many {name}", {who: waited(o.step, 10) for who, o in made.items()}, bench.rounds)
    what = f"{name}: GPT-2's {len(bench.model)} tensors against one flat tensor"
    bench.add("many", what, ratio(times, "one tensor", "148 tensors"), Bar(0.95, 0.99))


class _Peer(NamedTuple):
    what: str
    of: str  # our configuration to compare with
    make: Callable[[Shapes, int], Stepper]  # arguments: shapes, seed
    bar: Bar


_PEERS = {
    "fused": _Peer(
        "torch fused fp32 / ours fp32",
        "fp32",
        lambda shapes, seed: peers.torch_fused(shapes, torch.float32, seed, _DEVICE),
        Bar(1.0, 1.1),
    ),
    "mixed": _Peer(
        "the mixed recipe / ours (bf16)",
        "bf16",
        lambda shapes, seed: peers.MixedRecipe(shapes, seed, _DEVICE),
        Bar(2.0, 2.5),
    ),
    "bf16_states": _Peer(
        "torch fused, fp32 weights and bf16 states / ours (bf16)",
        "bf16",
        lambda shapes, seed: peers.torch_fused_bf16_states(shapes, seed, _DEVICE),
        Bar(0.97, 1.05),
    ),
}


def _torch(bench: Bench, name: str) -> None:
    """Compares the step of GPT-2's tensors with torch's fused AdamW or the mixed recipe."""
    what, of, make, bar = _PEERS[name]
    peer = make(bench.model, bench.seed)
    try:
        peer.step()
    except RuntimeError as refusal:
        bench.skip("torch", what, f"torch {torch.__version__} refuses it: {_first_line(refusal)}")
        return
    ours = optimizer_configs.ours(CONFIGURATIONS[of], bench.model, bench.seed, _DEVICE)
    contenders = {"theirs": waited(peer.step, 10), "ours": waited(ours.step, 10)}
    times = bench.run(f"torch {name}", contenders, bench.rounds)
    bench.add("torch", f"{what}, GPT-2", ratio(times, "theirs", "ours"), bar)


def launches(step: Callable[[], object]) -> list[str]:
    """Returns the names of the kernels that a step launches. User annotations are left out: torch marks the optimizer's
    step on the device's time line."""
    step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profile:
        step()
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    events = [e for e in profile.events() if e.device_type == on_device and not e.is_user_annotation]
    return [event.name for event in events if not event.name.startswith(("Memcpy", "Memset"))]


def _launches(bench: Bench, name: str) -> None:
    """Counts the kernels of a step, alone and with a clip."""
    ours = optimizer_configs.ours(CONFIGURATIONS[name], bench.model, bench.seed, _DEVICE)

    def clip_and_step() -> None:
        clip_grad_norm_(ours.optimizer, 1.0)
        ours.step()

    for what, step, most in ((name, ours.step, 1), (f"{name} with a clip", clip_and_step, 3)):
        names = launches(step)
        own = [kernel for kernel in names if "at::native" not in kernel]
        if not own:
            bench.skip("launches", f"{what}: kernels in a step", "torch.profiler saw none of ours")
            continue
        value = Spread(*[float(len(own))] * 3)
        beside = {"of torch": float(len(names) - len(own))}
        bench.add("launches", f"{what}: kernels in a step", value, Bar(most, most, lower_is_better=True), beside)


def _host_micros(steps: Mapping[str, Callable[[], object]]) -> dict[str, Spread]:
    """Returns the host's time until step() returns, in µs. All take turns. The device waits before each step, so that
    the queue is never full."""
    micros: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(_HOST_TURNS):
        for name, step in steps.items():
            for _ in range(3):
                step()
            for _ in range(_HOST_STEPS):
                torch.cuda.synchronize()
                begin = time.perf_counter()
                step()
                micros[name].append((time.perf_counter() - begin) * 1e6)
    torch.cuda.synchronize()
    return {name: spread(found) for name, found in micros.items()}


def _host(bench: Bench, name: str) -> None:
    """Measures the host's time of a step; beside it that of torch's fused AdamW in the same dtype, of a step after
    state_dict(), of one with a clip by its norm, and of one that may not repeat the one before."""
    configuration = CONFIGURATIONS[name]
    ours, saved, clipped, usual = (
        optimizer_configs.ours(configuration, bench.model, bench.seed, _DEVICE) for _ in range(4)
    )
    theirs = peers.torch_fused(bench.model, configuration.dtype, bench.seed, _DEVICE)
    found = _host_micros(
        {
            "ours": ours.step,
            "after state_dict()": small_rows.after_saving(saved),
            "with a clip": small_rows.clipping(clipped),
            "not repeated": other_ways.not_repeated(usual.step),
            "torch fused": theirs.step,
            "torch fused with a clip": small_rows.clipping(theirs),
        }
    )
    what = f"{name}: µs of the host in a step of {len(bench.model)} tensors"
    beside = {who: each.median for who, each in found.items() if who != "ours"}
    bench.add("host", what, found["ours"], Bar(100, 30, lower_is_better=True), beside)


def _peers(bench: Bench, name: str) -> None:
    gpu_peer_rows.shares(bench, name, _DEVICE)


def _muon(bench: Bench, name: str) -> None:
    gpu_muon_rows.compare(bench, name, _DEVICE)


# Row -> its function and the names of its parts.
ROWS: dict[str, tuple[Callable[..., None], Sequence[str]]] = {
    "wall": (_wall, ("fp32", "bf16", "bf16_remainder", "8bit")),
    "many": (_many, ("fp32", "bf16")),
    "torch": (_torch, tuple(_PEERS)),
    "host": (_host, ("fp32", "bf16")),
    "launches": (_launches, ("fp32", "bf16", "bf16_remainder", "8bit")),
    "muon": (_muon, gpu_muon_rows.MODELS),
    "peers": (_peers, tuple(gpu_peer_rows.PEERS)),
}
