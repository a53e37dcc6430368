"""Reference values for random histories (tests/feature_programs.py): masters, averages and engines."""

import random
from typing import Any

import torch
from feature_trainer import SHAPES, Trainer, whole
from torch import Tensor

import torch_ext


def masters_of(trainer: Trainer) -> dict[str, Tensor]:
    """Returns the whole masters in double, as the next step will use them: a written weight replaces its master."""
    optimizer = trainer.optimizer
    state = optimizer.consolidate_state_dict(to=None)["state"]
    optimizer.state_dict()  # which would be the whole one once more
    found = {}
    for index, (name, p) in enumerate(trainer.optimized()):
        weight = whole(p)
        master = state.get(index, {}).get("master_param", weight)
        stays = (master.to(weight.dtype) == weight) | (optimizer.on_external_write == "ignore")
        found[name] = torch.where(stays, master.double(), weight.double())
    return found


def steps_of(trainer: Trainer) -> dict[str, int]:
    """Returns the step count of each parameter, read without the optimizer's own access, which might change state."""
    state = trainer.optimizer.state
    return {name: int(dict.get(state, p, {}).get("step", 0)) for name, p in trainer.optimized()}


class Averages:
    """Computes the moving averages in double, from the masters of the trainer without features."""

    def __init__(self, decay: float, every: int) -> None:
        self.decay, self.every = decay, every
        self.of: dict[str, Tensor] = {}
        self.sizes: dict[str, float] = {}  # the largest norm of the masters so far
        self.counts: dict[str, int] = {}

    def stepped(self, counts: dict[str, int], masters: dict[str, Tensor]) -> None:
        for name, count in counts.items():
            before, self.counts[name] = self.counts.get(name, 0), count
            self.sizes[name] = max(self.sizes.get(name, 0.0), float(masters[name].norm()))
            if count != before and count % self.every == 0:
                if count == self.every or name not in self.of:
                    self.of[name] = masters[name]
                else:
                    self.of[name] = self.of[name] + (1 - self.decay) * (masters[name] - self.of[name])


class Engine:
    """An engine that follows the publisher. Its tensors may be fused and transposed ones."""

    def __init__(self, trainer: Trainer, draw: random.Random) -> None:
        self.names = list(trainer.params())
        self.fused = draw.random() < 0.5 and trainer.config.sliceable
        start = {name: whole(p) for name, p in trainer.params().items()}
        self.tensors = start
        mapping: Any = None
        if self.fused:
            vectors = [name for name, value in start.items() if value.ndim == 1]
            flat, mapping, at = torch.cat([start[name] for name in vectors]), {}, 0
            for name in vectors:
                numel = start[name].numel()
                mapping[name] = torch_ext.WeightSlice("fused", at=slice(at, at + numel))
                at += numel
            self.tensors = {name: value for name, value in start.items() if name not in vectors} | {"fused": flat}
            self.tensors["p3t"] = self.tensors.pop("p3").T.contiguous()
            mapping["p3"] = torch_ext.WeightSlice("p3t", transposed=True, shape=SHAPES[3])
            self.vectors = vectors
        self.subscriber = torch_ext.WeightSubscriber(self.tensors, mapping=mapping)

    def weights(self) -> dict[str, Tensor]:
        if not self.fused:
            return self.tensors
        found = {name: value for name, value in self.tensors.items() if name not in ("fused", "p3t")}
        found["p3"] = self.tensors["p3t"].T.contiguous()
        sizes = {"p1": 2600, "p2": 129, "p4": 1, "frozen": 1500}
        parts = self.tensors["fused"].split([sizes[name] for name in self.vectors])
        return found | dict(zip(self.vectors, parts, strict=True))
