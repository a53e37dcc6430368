"""Trains the main job's model from random weights by Muon: torch.optim.Muon on an fp32 model, and torch_ext.Muon on a
bf16 model, with 16-bit remainders and with 8-bit momentum. For comparison, torch.optim.AdamW on an fp32 model.

    python examples/gpt/by_muon.py            # a few minutes on two cores
    python examples/gpt/by_muon.py --quick    # seconds: every optimizer, no claims

Three seeds each, in one process. The runs of one seed start from the same weights and read the same text in the same
order. Prints a table. Exits with status 1 if the mean loss of a torch_ext run is above torch.optim.Muon's by more than
the seeds of torch.optim.Muon differ from each other.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).absolute().parents[2]))  # the repository's root; not needed where it is installed
import text
from configurations import Training
from model import GPT
from stages import FULL, QUICK, Stage, held_out_loss, train_steps
from tables import markdown

import torch_ext

SEEDS = range(3)
# Updates as large as AdamW's, so that all optimizers share one learning rate, schedule and weight_decay.
MUON: dict[str, Any] = {"adjust_lr_fn": "match_rms_adamw"}


class Together:
    """Several optimizers as one: torch.optim.Muon takes matrices only, and needs a second optimizer for the rest."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self._all = optimizers

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for one in self._all for group in one.param_groups]

    def step(self) -> None:
        for one in self._all:
            one.step()

    def zero_grad(self) -> None:
        for one in self._all:
            one.zero_grad()


def torchs_adamw(model: GPT, decay: float, _seed: int) -> Any:
    return torch.optim.AdamW(model.parameters(), weight_decay=decay)


def torchs_muon(model: GPT, decay: float, _seed: int) -> Any:
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and name != "bytes.weight"]
    rest = [p for name, p in model.named_parameters() if p.dim() != 2 or name == "bytes.weight"]
    muon = torch.optim.Muon(matrices, weight_decay=decay, **MUON)
    return Together(muon, torch.optim.AdamW(rest, weight_decay=decay))


def ours(states: Any) -> Callable[[GPT, float, int], Any]:
    """Returns a function that creates torch_ext.Muon. Muon finds the embedding, to which the head is tied, itself."""

    def made(model: GPT, decay: float, seed: int) -> Any:
        return torch_ext.Muon(model, weight_decay=decay, states=states, seed=seed, **MUON)

    return made


@dataclass(frozen=True)
class Contender:
    label: str
    dtype: torch.dtype
    optimizer: Callable[[GPT, float, int], Any]


REFERENCE = Contender("torch.optim.Muon, fp32 model", torch.float32, torchs_muon)
CONTENDERS = [
    Contender("torch.optim.AdamW, fp32 model", torch.float32, torchs_adamw),
    REFERENCE,
    Contender("torch_ext.Muon `bf16_remainder`", torch.bfloat16, ours("bf16_remainder")),
    Contender("torch_ext.Muon `8bit`", torch.bfloat16, ours("8bit")),
]


def held_out(contender: Contender, stage: Stage, seed: int) -> tuple[float, float]:
    """Trains; returns the held-out loss in nats per byte, and bytes of weights and optimizer states per parameter."""
    torch.manual_seed(seed)
    model = GPT(stage.config).to(contender.dtype)
    optimizer = contender.optimizer(model, stage.weight_decay, seed)
    training = Training(model, optimizer, lambda norm: nn.utils.clip_grad_norm_(model.parameters(), norm))
    steps = train_steps(stage, training, seed, range(stage.steps))
    for _ in tqdm(steps, f"{contender.label}, seed {seed}", stage.steps, mininterval=1, leave=False):
        pass
    loss = held_out_loss(model, text.held_out(stage.corpus, stage.config.context, stage.held_out))
    optimizers = optimizer._all if isinstance(optimizer, Together) else [optimizer]
    kept = [t for one in optimizers for state in one.state.values() for t in state.values() if torch.is_tensor(t)]
    numel = sum(p.numel() for p in model.parameters())
    return loss, sum(t.nbytes for t in (*kept, *model.parameters())) / numel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model, a few steps")
    quick = parser.parse_args().quick
    stage = replace(QUICK["scratch"], steps=8) if quick else replace(FULL["scratch"], steps=120)
    torch.set_num_threads(1)  # more is slower: the model is small
    seeds = SEEDS[:2] if quick else SEEDS
    found = {c: [held_out(c, stage, seed) for seed in seeds] for c in CONTENDERS}
    losses = {c: [loss for loss, _ in runs] for c, runs in found.items()}
    mean, spread = statistics.mean(losses[REFERENCE]), statistics.stdev(losses[REFERENCE])
    rows = [["optimizer", "bytes per parameter", "held-out loss, each seed", "mean - torch.optim.Muon's"]]
    for c, runs in found.items():
        of_seeds = ", ".join(f"{loss:.4f}" for loss in losses[c])
        difference = "" if c is REFERENCE else f"{statistics.mean(losses[c]) - mean:+.4f}"
        rows.append([c.label, f"{runs[0][1]:.2f}", of_seeds, difference])
    parameters = sum(p.numel() for p in GPT(stage.config).parameters())
    print(
        f"Byte-level GPT, {parameters:,} parameters, {stage.steps} steps of {stage.batch} x {stage.config.context} "
        f"bytes of the standard library (text {text.fingerprint()}), learning rate up to {stage.peak_lr:g}.\n\n"
        f"{markdown(rows)}\n\nBytes of weights and optimizer states. The spread of torch.optim.Muon's seeds, "
        f"their sample standard deviation, is {spread:.4f}."
    )
    if not all(math.isfinite(loss) for of in losses.values() for loss in of):
        raise SystemExit("a run ended with a loss that is not finite")
    worst = max(statistics.mean(losses[c]) for c in CONTENDERS if c.label.startswith("torch_ext"))
    if not quick and worst - mean > max(losses[REFERENCE]) - min(losses[REFERENCE]):
        raise SystemExit("torch_ext.Muon is further from torch.optim.Muon than the seeds are from each other")


if __name__ == "__main__":
    main()
