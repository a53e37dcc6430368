"""What it costs to notice writes by others to weights beside masters, and to resync by hand."""

from collections.abc import Callable

import torch

from bench import optimizer_configs
from bench.optimizer_configs import CONFIGURATIONS, Training
from bench.workload import Shapes, numel

READ = {
    "bf16": 6,
    "bf16_remainder": 2,
}  # bytes per parameter that resync_masters() reads: weights and fp32 masters; weights
_COLUMNS = 15  # of slices of adamw_flat_ without checksums


def noticing(name: str, shapes: Shapes, seed: int) -> dict[str, Callable[[], object]]:
    """Steps of two optimizers that differ in nothing but that one has no checksums, and looks at nothing."""
    blind, seeing = (optimizer_configs.ours(CONFIGURATIONS[name], shapes, seed) for _ in range(2))
    blind.step()
    _blind(blind)
    return {"without": blind.step, "with": seeing.step}


def _blind(training: Training) -> None:
    optimizer = training.optimizer
    optimizer.on_external_write = "ignore"  # type: ignore[attr-defined]
    plan = optimizer._stepper.plan  # type: ignore[attr-defined]
    device = plan.device
    device.batches = [batch._replace(slices=batch.slices[:, :_COLUMNS].contiguous()) for batch in device.batches]


def resyncing(name: str, shapes: Shapes, seed: int) -> dict[str, Callable[[], object]]:
    """resync_masters() where nothing is to be changed, and torch's sum of as many bytes in fp32."""
    training = optimizer_configs.ours(CONFIGURATIONS[name], shapes, seed)
    training.step()
    read = torch.ones(numel(shapes) * READ[name] // 4)
    return {"resync": training.optimizer.resync_masters, "read": read.sum}  # type: ignore[attr-defined]
