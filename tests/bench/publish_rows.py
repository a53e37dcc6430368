"""What it costs to publish weights: the step that notes what it changes, and deltas made and applied."""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator

import torch

from bench import optimizer_configs, timing
from bench.figures import Bar
from bench.optimizer_configs import CONFIGURATIONS, Training
from bench.row import Bench
from torch_ext.weight_sync import delta_library
from torch_ext.weight_sync.publisher import WeightPublisher
from torch_ext.weight_sync.subscriber import WeightSubscriber

_STEP = Bar(1.08, 1.03, lower_is_better=True)
_ENCODE = Bar(12, 5, lower_is_better=True)
_APPLY = Bar(15, 6, lower_is_better=True)
_EACH = Bar(20, 5, lower_is_better=True)
_LR = 1e-6


class _Model(torch.nn.Module):
    """The parameters that an optimizer steps, and nothing else."""

    def __init__(self, training: Training) -> None:
        super().__init__()
        for i, group in enumerate(training.optimizer.param_groups):
            for j, p in enumerate(group["params"]):
                self.register_parameter(f"p{i}_{j}", p)


def publisher(bench: Bench) -> None:
    """A step of two optimizers, of which one has a publisher."""
    for name in ("bf16", "bf16_remainder", "8bit"):
        alone, noting = (optimizer_configs.ours(CONFIGURATIONS[name], bench.flat, bench.seed) for _ in range(2))
        kept = WeightPublisher(_Model(noting), noting.optimizer)
        times = bench.run(f"publisher, {name}", {"without": alone.step, "with": noting.step}, bench.rounds)
        bench.add("publisher", f"{name}: step with a publisher / step", timing.ratio(times, "with", "without"), _STEP)
        del kept


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def deltas(bench: Bench) -> None:
    """One step at 1e-6, published and applied, on one thread, whose processor time is taken: others' does not count.

    encode and apply: tx_delta_encode and tx_delta_apply, without what one read of all weights takes, which is measured
    beside them: both need the weights, for their checksums, and as what positions depend on. publish: all of publish(),
    which compares the weights with their masters, too: what somebody else wrote to them travels."""
    with one_thread():
        _deltas(bench)


class _Stopwatch:
    """Seconds of the library's calls for deltas, by their names."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        plain = delta_library.call

        def timed(name: str, *arguments: object) -> None:
            begin = time.thread_time()
            plain(name, *arguments)
            self.seconds[name] = time.thread_time() - begin

        delta_library.call = timed
        try:
            yield
        finally:
            delta_library.call = plain


def _deltas(bench: Bench) -> None:
    training = optimizer_configs.ours(CONFIGURATIONS["bf16"], bench.flat, bench.seed)
    for group in training.optimizer.param_groups:
        group["lr"], group["weight_decay"] = _LR, 0.0
    training.step()
    model = _Model(training)
    source = WeightPublisher(model, training.optimizer)
    subscriber = WeightSubscriber({name: p.detach().clone() for name, p in model.named_parameters()})
    rounds = [_publish_once(model, training.step, source, subscriber) for _ in range(bench.rounds + 1)]
    del rounds[0]  # it touches memory
    median = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
    beside = {"changed": median["changed"] / bench.params, "bits": 8 * median["bytes"] / bench.params}
    for what, bar in (("encode", _ENCODE), ("apply", _APPLY)):
        ns = [1e9 * (one[what] - one["read"]) / max(one["changed"], 1) for one in rounds]
        read = {"read": 1e9 * median["read"] / max(median["changed"], 1)}
        bench.add(
            "deltas", f"{what}, without a read of the weights: ns per changed weight", timing.spread(ns), bar, read
        )
    ns = [1e9 * one["publish"] / max(one["changed"], 1) for one in rounds]
    bench.add("deltas", "publish: ns per changed weight", timing.spread(ns), None, beside)
    bench.add("deltas", "publish of 1000 parameters of 64 weights: us each", _of_many(bench), _EACH)


def _of_many(bench: Bench) -> timing.Spread:
    """Microseconds for each of many small parameters, which is what one costs however small it is."""
    training = optimizer_configs.ours(CONFIGURATIONS["bf16"], [(64,)] * 1000, bench.seed)
    source = WeightPublisher(_Model(training), training.optimizer)
    found = []
    for _ in range(bench.rounds + 1):
        training.step()
        begin = time.thread_time()
        source.publish()
        found.append(1e6 * (time.thread_time() - begin) / 1000)
    return timing.spread(found[1:])  # the first one looks where everything is


def _publish_once(
    model: torch.nn.Module, step: Callable[[], object], source: WeightPublisher, subscriber: WeightSubscriber
) -> dict[str, float]:
    """Seconds of a version, the weights that it changes, and its bytes."""
    before = [p.detach().clone() for p in model.parameters()]
    step()
    watch = _Stopwatch()
    with watch.running():
        begin = time.thread_time()
        delta = source.publish()
        publish = time.thread_time() - begin
        subscriber.apply(delta)
    changed = sum(int((p != old).sum()) for p, old in zip(model.parameters(), before, strict=True))
    words = [p.detach().view(torch.int16).view(-1)[: p.numel() // 4 * 4].view(torch.int64) for p in model.parameters()]
    begin = time.thread_time()
    for part in words:
        part.sum()
    read = time.thread_time() - begin
    return watch.seconds | {"publish": publish, "read": read, "changed": changed, "bytes": len(delta)}
