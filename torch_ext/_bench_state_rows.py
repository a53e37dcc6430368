"""The rows of the benchmark about states and masters between steps, or elsewhere: on the host, away, written by others,
saved and loaded."""

import statistics
from collections.abc import Callable

from torch_ext import _bench_checkpoint, _bench_configurations, _bench_external, _bench_measure, _bench_offload
from torch_ext._bench_configurations import CONFIGURATIONS
from torch_ext._bench_figures import Bar
from torch_ext._bench_measure import Spread
from torch_ext._bench_row import Bench

# -- offload: weights and states to the host and back, against a plain copy of as many bytes ---------------------------


def offload(bench: Bench) -> None:
    for what, shapes in {"one tensor": bench.flat, f"{len(bench.model)} tensors": bench.model}.items():
        trip = _bench_offload.Trip(shapes, bench.seed)
        contenders: dict[str, Callable[[], object]] = {
            "offload + onload": trip.there_and_back,
            "plain copy": _bench_offload.plain_copy(trip.nbytes, fresh=True),
            "plain copy, nothing released": _bench_offload.plain_copy(trip.nbytes, fresh=False),
        }
        times = bench.run(f"offload, {what}", contenders, bench.rounds)
        both = statistics.median(times["offload + onload"])
        beside = {
            "GB": trip.nbytes / 1e9,
            "GB/s both ways": 2e-9 * trip.nbytes / both,
            "GB/s down": 1e-9 * trip.nbytes / statistics.median(trip.down),
            "of a copy that releases nothing": _bench_measure.ratio(
                times, "plain copy, nothing released", "offload + onload"
            ).median,
        }
        value = _bench_measure.ratio(times, "plain copy", "offload + onload")
        bench.add("offload", f"offload + onload, {what}: fraction of a plain copy", value, Bar(0.8, 0.95), beside)
        del trip, contenders


# -- external: noticing what others write to weights beside masters ----------------------------------------------------

_NOTICING = {"a": Bar(1.04, 1.01, True), "b": Bar(1.06, 1.02, True), "c": Bar(1.06, 1.02, True)}


def external(bench: Bench) -> None:
    for what, shapes in {"one tensor": bench.flat, f"{len(bench.model)} tensors": bench.model}.items():
        for name, bar in _NOTICING.items():
            times = bench.run(
                f"external, {name}, {what}", _bench_external.noticing(name, shapes, bench.seed), bench.rounds
            )
            value = _bench_measure.ratio(times, "with", "without")
            bench.add("external", f"{name}, {what}: step that notices writes by others / that does not", value, bar)
    for name in _bench_external.READ:
        times = bench.run(
            f"external, resync, {name}", _bench_external.resyncing(name, bench.flat, bench.seed), bench.rounds
        )
        value = _bench_measure.ratio(times, "read", "resync")
        bench.add("external", f"{name}: one read / resync_masters()", value, Bar(0.8, 0.95))


# -- checkpoint: the most that is resident while an optimizer's state is saved and loaded, over the state itself
# ---------


def checkpoint(bench: Bench) -> None:
    for name, way in (("a", "dcp"), ("c", "dcp"), ("c", "file")):
        try:
            saving, loading = _bench_checkpoint.measure(name, way, bench.model, bench.seed)
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


# -- host: the part of the optimizer that is stepped on the host, all of it, with the host in the device's place ------

_HOST_BAR = Bar(0.80, 0.92)


def host(bench: Bench) -> None:
    for name, copied in _bench_configurations.COPIED.items():
        configuration = CONFIGURATIONS[name]
        counted = configuration.traffic + copied
        plain = _bench_configurations.ours(configuration, bench.flat, bench.seed)
        offloaded = _bench_configurations.ours(configuration, bench.flat, bench.seed, offload_fraction=1.0)
        contenders: dict[str, Callable[[], object]] = {
            "wall": _bench_configurations.wall(counted, bench.params),
            "in place": plain.step,
            "on the host": offloaded.step,
        }
        times = bench.run(f"host, {name}", contenders, bench.rounds)
        ns = {f"{who} ns": statistics.median(times[who]) * 1e9 / bench.params for who in contenders}
        what = f"{name}: offload_fraction=1, share of the wall of {counted:g} bytes"
        bench.add("host", what, _bench_measure.ratio(times, "wall", "on the host"), _HOST_BAR, ns)
