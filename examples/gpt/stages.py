"""The three trainings of the main job, and the loop that they share.

pretrain    on code, from random weights: makes the checkpoint from which fine-tuning starts
scratch     on code, from random weights, few steps at a high learning rate: no configuration loses anything
finetune    on documentation, from the checkpoint, at a low learning rate: bf16 weights without masters lose updates
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import text
import torch
from model import Config
from torch import Tensor

if TYPE_CHECKING:
    from configurations import Training


@dataclass(frozen=True)
class Stage:
    """Sizes of one training. A step reads `world * batch * config.context` bytes; `held_out` counts sequences."""

    config: Config
    corpus: str  # a name of text.CORPORA
    batch: int
    steps: int
    warmup: int
    peak_lr: float
    held_out: int
    least_lr_factor: float = 0.1
    weight_decay: float = 0.1
    max_norm: float = 1.0
    checkpoint: str | None = None  # a file in the output folder; None: random weights

    def lr_factor(self, step: int) -> float:
        """Linear warm-up, then a cosine down to `least_lr_factor`."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        least = self.least_lr_factor
        return least + (1 - least) / 2 * (1 + math.cos(math.pi * min(1.0, done)))

    @property
    def preview_every(self) -> int:
        """Steps between two evaluations on a tenth of the held-out text."""
        return max(1, self.steps // 10)


PRETRAINED = "pretrained.pt"
_MODEL = Config(layers=2, heads=4, width=128, context=128)
FULL = {
    "pretrain": Stage(_MODEL, "code", 4, steps=1500, warmup=100, peak_lr=2e-3, held_out=800),
    # The beginning of a pretraining: so early in a schedule the learning rate has not decayed yet.
    "scratch": Stage(_MODEL, "code", 4, steps=200, warmup=40, peak_lr=2e-3, held_out=800, least_lr_factor=1.0),
    "finetune": Stage(
        _MODEL,
        "documentation",
        8,
        steps=300,
        warmup=20,
        peak_lr=1e-4,
        held_out=800,
        least_lr_factor=0.0,
        checkpoint=PRETRAINED,
    ),
}
_TINY = Config(layers=2, heads=2, width=64, context=64)
QUICK = {
    "pretrain": replace(FULL["pretrain"], config=_TINY, steps=60, warmup=10, held_out=50),
    "scratch": replace(FULL["scratch"], config=_TINY, steps=20, warmup=4, peak_lr=2e-3, held_out=50),
    "finetune": replace(FULL["finetune"], config=_TINY, batch=4, steps=60, warmup=4, held_out=50),
}


def train_steps(
    stage: Stage, training: Training, seed: int, steps: range, rank: int = 0, world: int = 1
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Trains `steps`. After each step, while the gradients exist, yields its number (from 1), this rank's loss and the
    norm of the gradients. The text read depends only on the seed, the step and the rank."""
    optimizer, written = training.optimizer, text.corpus(stage.corpus).training
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = stage.peak_lr * stage.lr_factor(step)
        size = stage.config.context, stage.batch
        loss = training.module(text.batch(written, *size, seed=seed, step=step, rank=rank, world=world))
        loss.backward()
        norm = training.clip(stage.max_norm)
        optimizer.step()
        yield step + 1, loss.detach(), torch.as_tensor(norm)
        optimizer.zero_grad()


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, windows: Tensor, rank: int = 0, world: int = 1) -> float:
    """Returns the mean negative log-likelihood over all windows, nats per byte. The ranks divide the windows."""
    total = torch.zeros(1, dtype=torch.float64)
    for chunk in windows[rank::world].split(64):
        total += model(chunk).double() * len(chunk)
    if world > 1:
        torch.distributed.all_reduce(total)
    return total.item() / len(windows)
