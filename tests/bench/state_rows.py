"""The benchmark's rows about optimizer states and master weights: offloaded, stepped on the host, out of date after an
external write, saved and loaded."""

import statistics
from collections.abc import Callable

from bench import checkpoint_rows, offload_rows, optimizer_configs, timing, write_check_rows
from bench.figures import Bar
from bench.optimizer_configs import CONFIGURATIONS
from bench.row import Bench
from bench.timing import Spread

# -- offload: moving weights and states to the host and back, against a plain copy of as many bytes --------------------


def offload(bench: Bench) -> None:
    for what, shapes in {"one tensor": bench.flat, f"{len(bench.model)} tensors": bench.model}.items():
        trip = offload_rows.Trip(shapes, bench.seed)
        contenders: dict[str, Callable[[], object]] = {
            "offload + onload": trip.there_and_back,
            "plain copy": offload_rows.plain_copy(trip.nbytes, fresh=True),
            "plain copy, nothing released": offload_rows.plain_copy(trip.nbytes, fresh=False),
        }
        times = bench.run(f"offload, {what}", contenders, bench.rounds)
        both = statistics.median(times["offload + onload"])
        beside = {
            "GB": trip.nbytes / 1e9,
            "GB/s both ways": 2e-9 * trip.nbytes / both,
            "GB/s down": 1e-9 * trip.nbytes / statistics.median(trip.down),
            "of a copy that releases nothing": timing.ratio(
                times, "plain copy, nothing released", "offload + onload"
            ).median,
        }
        value = timing.ratio(times, "plain copy", "offload + onload")
        bench.add("offload", f"offload + onload, {what}: fraction of a plain copy", value, Bar(0.8, 0.95), beside)
        del trip, contenders


# -- external: detecting writes to weights that have a master weight ---------------------------------------------------

_NOTICING = {"bf16": Bar(1.04, 1.01, True), "bf16_remainder": Bar(1.06, 1.02, True), "8bit": Bar(1.06, 1.02, True)}


def external(bench: Bench) -> None:
    for what, shapes in {"one tensor": bench.flat, f"{len(bench.model)} tensors": bench.model}.items():
        for name, bar in _NOTICING.items():
            times = bench.run(
                f"external, {name}, {what}", write_check_rows.noticing(name, shapes, bench.seed), bench.rounds
            )
            value = timing.ratio(times, "with", "without")
            bench.add("external", f"{name}, {what}: step that notices writes by others / that does not", value, bar)
    for name in write_check_rows.READ:
        times = bench.run(
            f"external, resync, {name}", write_check_rows.resyncing(name, bench.flat, bench.seed), bench.rounds
        )
        value = timing.ratio(times, "read", "resync")
        bench.add("external", f"{name}: one read / resync_masters()", value, Bar(0.8, 0.95))


# -- checkpoint: peak memory while an optimizer's state is saved and loaded, relative to the state itself --------------


def checkpoint(bench: Bench) -> None:
    for name, way in (("bf16", "dcp"), ("8bit", "dcp"), ("8bit", "file")):
        try:
            saving, loading = checkpoint_rows.measure(name, way, bench.model, bench.seed)
        except RuntimeError as failure:
            bench.skip("checkpoint", f"{name}, {way}: peak memory", failure)
            continue
        over = "state and decoded state" if way == "file" else "state"
        peaks = {"save": saving.state + saving.extra, "load": max(loading.extra, loading.state)}
        for what, peak in peaks.items():
            value = peak / (saving.state + (saving.decoded if way == "file" else 0))
            beside = {"state MB": saving.state / 1e6, "decoded MB": saving.decoded / 1e6}
            name_of_it = f"{name}, {way}, {what}: peak memory / {over}"
            bench.add("checkpoint", name_of_it, Spread(*[value] * 3), Bar(1.1, 1.02, True), beside)


# -- host: stepping all of the optimizer on the host (offload_fraction=1); here the device is the host as well ---------

_HOST_BAR = Bar(0.80, 0.92)


def host(bench: Bench) -> None:
    for name, copied in optimizer_configs.COPIED.items():
        configuration = CONFIGURATIONS[name]
        counted = configuration.traffic + copied
        plain = optimizer_configs.ours(configuration, bench.flat, bench.seed)
        offloaded = optimizer_configs.ours(configuration, bench.flat, bench.seed, offload_fraction=1.0)
        contenders: dict[str, Callable[[], object]] = {
            "wall": optimizer_configs.wall(counted, bench.params),
            "in place": plain.step,
            "on the host": offloaded.step,
        }
        times = bench.run(f"host, {name}", contenders, bench.rounds)
        ns = {f"{who} ns": statistics.median(times[who]) * 1e9 / bench.params for who in contenders}
        what = f"{name}: offload_fraction=1, share of the wall of {counted:g} bytes"
        bench.add("host", what, timing.ratio(times, "wall", "on the host"), _HOST_BAR, ns)
