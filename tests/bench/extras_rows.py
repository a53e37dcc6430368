"""The benchmark's rows about steps with extra outputs: an average of the weights (ema), and health measurements."""

from typing import Any

import torch

from bench import optimizer_configs, timing
from bench.figures import Bar
from bench.optimizer_configs import CONFIGURATIONS, Configuration
from bench.row import Bench

# Name -> the value of AdamW's `ema_dtype`, and the bytes of the average that are read and written per parameter.
_AVERAGES: dict[str, tuple[Any, int]] = {"bf16": (torch.bfloat16, 4), "24bit": ("24bit", 6), "fp32": (torch.float32, 8)}
_AVERAGED = Bar(1.15, 1.05, lower_is_better=True)
_MEASURED = Bar(1.05, 1.02, lower_is_better=True)
_NOT_MEASURED = Bar(1.005, 1.0, lower_is_better=True)  # no cost, as far as can be measured


def ema(bench: Bench) -> None:
    """Compares the step that keeps an average with the wall of the bytes that step and average read and write. With
    8-bit states the step is bound by the kernel instead, so the ratio to the step without an average is printed too."""
    for configuration in CONFIGURATIONS.values():
        alone = optimizer_configs.ours(configuration, bench.flat, bench.seed)
        for name, (dtype, traffic) in _AVERAGES.items():
            _ema_of(bench, configuration, alone.step, name, dtype, configuration.traffic + traffic)


def _ema_of(bench: Bench, configuration: Configuration, alone: Any, name: str, dtype: Any, traffic: float) -> None:
    averaging = optimizer_configs.ours(configuration, bench.flat, bench.seed, ema_decay=0.999, ema_dtype=dtype)
    contenders = {"alone": alone, "with": averaging.step, "wall": optimizer_configs.wall(traffic, bench.params)}
    times = bench.run(f"ema, {configuration.name}, {name}", contenders, bench.rounds)
    beside = {"/ step": timing.ratio(times, "with", "alone").median}
    what = f"{configuration.name}, average in {name}: step with it / wall"
    bench.add("ema", what, timing.ratio(times, "with", "wall"), _AVERAGED, beside)


def health(bench: Bench) -> None:
    """Compares a step that measures, and a step that does not although earlier ones did, with a step of an optimizer
    that never measures."""
    for name, configuration in CONFIGURATIONS.items():
        never, measuring = (optimizer_configs.ours(configuration, bench.flat, bench.seed) for _ in range(2))

        def measured(of: optimizer_configs.Training = measuring) -> None:
            of.optimizer.measure_health()  # type: ignore[attr-defined]  # a method of torch_ext.AdamW
            of.step()

        contenders = {"never": never.step, "measured": measured, "not measured": measuring.step}
        times = bench.run(f"health, {name}", contenders, bench.rounds)
        bench.add("health", f"{name}: step that measures / step", timing.ratio(times, "measured", "never"), _MEASURED)
        others = timing.ratio(times, "not measured", "never")
        bench.add("health", f"{name}: step that does not measure / step", others, _NOT_MEASURED)
