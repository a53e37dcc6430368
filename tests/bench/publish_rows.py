"""What it costs to publish weights: the step that notes what it changes, and deltas made and applied."""

import statistics
import time

import torch

from bench import optimizer_configs, timing
from bench.figures import Bar
from bench.optimizer_configs import CONFIGURATIONS, Training
from bench.row import Bench
from torch_ext.weight_sync.publisher import WeightPublisher
from torch_ext.weight_sync.subscriber import WeightSubscriber

_STEP = Bar(1.08, 1.03, lower_is_better=True)
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


def deltas(bench: Bench) -> None:
    """One step at 1e-6, published and applied, on one thread. Making a delta reads all weights and masters: what
    somebody else wrote to them travels, too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        _deltas(bench)
    finally:
        torch.set_num_threads(threads)


def _deltas(bench: Bench) -> None:
    training = optimizer_configs.ours(CONFIGURATIONS["bf16"], bench.flat, bench.seed)
    for group in training.optimizer.param_groups:
        group["lr"], group["weight_decay"] = _LR, 0.0
    training.step()
    model = _Model(training)
    source = WeightPublisher(model, training.optimizer)
    subscriber = WeightSubscriber({name: p.detach().clone() for name, p in model.named_parameters()})
    found: dict[str, list[float]] = {"publish": [], "apply": [], "changed": [], "bytes": []}
    for _ in range(bench.rounds + 1):  # the first one touches memory
        before = [p.detach().clone() for p in model.parameters()]
        training.step()
        begin = time.perf_counter()
        delta = source.publish()
        middle = time.perf_counter()
        subscriber.apply(delta)
        end = time.perf_counter()
        changed = sum(int((p != old).sum()) for p, old in zip(model.parameters(), before, strict=True))
        for key, value in (("publish", middle - begin), ("apply", end - middle), ("changed", changed)):
            found[key].append(value)
        found["bytes"].append(len(delta))
    beside = {
        "changed": statistics.median(found["changed"][1:]) / bench.params,
        "bits": 8 * statistics.median(found["bytes"][1:]) / bench.params,
    }
    for what in ("publish", "apply"):
        ns = [1e9 * t / max(n, 1) for t, n in zip(found[what][1:], found["changed"][1:], strict=True)]
        bench.add("deltas", f"{what}: ns per changed weight", timing.spread(ns), None, beside)
