"""The benchmark's rows about the cost of publishing weights: steps that record their changes, and deltas that are
encoded and applied."""

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
    """A module with the parameters that an optimizer steps, and nothing else."""

    def __init__(self, training: Training) -> None:
        super().__init__()
        for i, group in enumerate(training.optimizer.param_groups):
            for j, p in enumerate(group["params"]):
                self.register_parameter(f"p{i}_{j}", p)


def publisher(bench: Bench) -> None:
    """Compares the steps of two optimizers; one of them has a publisher."""
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
    """Times publishing and applying a step with lr 1e-6, in processor time of one thread.

    encode and apply: the time of tx_delta_encode and tx_delta_apply, less the time of one read of all weights, which is
    printed too. Both have to read the weights, for their checksums and to find the positions. publish: all of
    publish(). It also compares the weights with their master weights, so that external writes are published as well."""
    with one_thread():
        _deltas(bench)


class _Stopwatch:
    """Records the seconds of the library's calls for deltas, by name."""

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
    del rounds[0]  # slower: it touches memory for the first time
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
    """Returns the microseconds of publish() per parameter, with many small ones: the cost of a parameter that does not
    depend on its size."""
    training = optimizer_configs.ours(CONFIGURATIONS["bf16"], [(64,)] * 1000, bench.seed)
    source = WeightPublisher(_Model(training), training.optimizer)
    found = []
    for _ in range(bench.rounds + 1):
        training.step()
        begin = time.thread_time()
        source.publish()
        found.append(1e6 * (time.thread_time() - begin) / 1000)
    return timing.spread(found[1:])  # the first publish() also looks up where all tensors are


def _publish_once(
    model: torch.nn.Module, step: Callable[[], object], source: WeightPublisher, subscriber: WeightSubscriber
) -> dict[str, float]:
    """Steps, publishes a version and applies it. Returns the seconds of each part, the number of changed weights and
    the bytes of the delta."""
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
