"""The contenders of the row `external`: the cost of detecting external writes to weights that have a master weight, and
of resync_masters()."""

from collections.abc import Callable

import torch

from bench import optimizer_configs
from bench.optimizer_configs import CONFIGURATIONS, Training
from bench.workload import Shapes, numel

# Bytes per parameter that resync_masters() reads: weights and fp32 masters, or weights alone.
READ = {"bf16": 6, "bf16_remainder": 2}
_COLUMNS = 15  # columns in the slices argument of adamw_flat_ if there are no checksums


def noticing(name: str, shapes: Shapes, seed: int) -> dict[str, Callable[[], object]]:
    """Returns the steps of two optimizers. One of them has no checksums and detects nothing; they are otherwise
    equal."""
    without_checks, with_checks = (optimizer_configs.ours(CONFIGURATIONS[name], shapes, seed) for _ in range(2))
    without_checks.step()
    _drop_checksums(without_checks)
    return {"without": without_checks.step, "with": with_checks.step}


def _drop_checksums(training: Training) -> None:
    """Removes the checksums from an optimizer's plan, so that its steps do not check for external writes."""
    optimizer = training.optimizer
    optimizer.on_external_write = "ignore"  # type: ignore[attr-defined]
    plan = optimizer._stepper.plan  # type: ignore[attr-defined]
    device = plan.device
    device.batches = [batch._replace(slices=batch.slices[:, :_COLUMNS].contiguous()) for batch in device.batches]


def resyncing(name: str, shapes: Shapes, seed: int) -> dict[str, Callable[[], object]]:
    """Returns resync_masters() with nothing to resync, and torch's sum of as many bytes in fp32."""
    training = optimizer_configs.ours(CONFIGURATIONS[name], shapes, seed)
    training.step()
    read = torch.ones(numel(shapes) * READ[name] // 4)
    return {"resync": training.optimizer.resync_masters, "read": read.sum}  # type: ignore[attr-defined]
