"""The loss of the byte-level GPT under every configuration of the optimizer, after a longer run of a smaller model.

    python examples/gpt/configurations.py            # ten minutes on two cores
    python examples/gpt/configurations.py --quick    # seconds: every configuration, no claims

Runs of one seed begin with the same weights and read the same text in the same order; torch_ext.AdamW steps all of
them, beta2 = 0.999. Several seeds of the fp32 model say how far apart two runs may end without meaning anything. Each
run has one thread, and there are as many runs at a time as cores; the losses do not depend on that.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).absolute().parents[2]))  # the repository's root; not needed where it is installed
import text
from model import GPT, Config
from tqdm import tqdm
from train import Job

import torch_ext

REMAINDER = {"store_param_remainders": True}
EIGHT_BITS = {"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp8"}
NO_MASTER = {"main_params_dtype": None}


@dataclass(frozen=True)
class Configuration:
    name: str
    dtype: torch.dtype
    settings: dict[str, object]  # override_optimizer_config
    roundings: dict[str, str]  # arguments of AdamW
    seeds: tuple[int, ...] = (0,)


CONFIGURATIONS = [
    Configuration("fp32 model", torch.float32, {}, {}, seeds=(0, 1, 2)),
    Configuration("bf16: moments in bf16, masters in fp32", torch.bfloat16, {}, {}),
    Configuration("bf16_remainder: moments in bf16, remainders", torch.bfloat16, REMAINDER, {}),
    Configuration("8bit: moments in 8 bits, remainders", torch.bfloat16, REMAINDER | EIGHT_BITS, {}),
    Configuration("bf16_remainder, moments to nearest", torch.bfloat16, REMAINDER, {"moment_rounding": "nearest"}),
    Configuration("8bit, moments to nearest", torch.bfloat16, REMAINDER | EIGHT_BITS, {"moment_rounding": "nearest"}),
    Configuration("no masters, weights dithered", torch.bfloat16, NO_MASTER, {"weight_rounding": "dithered"}),
    Configuration("no masters, weights to nearest", torch.bfloat16, NO_MASTER, {"weight_rounding": "nearest"}),
]


# Down to a hundredth of the learning rate: where updates are small, rounding shows.
FULL = Job(
    Config(layers=2, heads=2, width=64, context=64),
    batch=8,
    steps=2500,
    warmup=100,
    peak_lr=3e-3,
    held_out=2000,
    validate_every=2500,
    least_lr_factor=0.01,
)
QUICK = replace(
    FULL,
    config=Config(layers=1, heads=2, width=32, context=32),
    batch=4,
    steps=20,
    warmup=4,
    held_out=50,
    validate_every=20,
)


def train(index: int, seed: int, job: Job) -> float:
    """Trains CONFIGURATIONS[index]; returns the mean negative log-likelihood of the held-out text, nats per byte."""
    torch.set_num_threads(1)
    chosen, context = CONFIGURATIONS[index], job.config.context
    torch.manual_seed(seed)
    model = GPT(job.config).to(chosen.dtype)
    policy = torch_ext.load_policy(model, override_optimizer_config=chosen.settings)
    optimizer = torch_ext.AdamW(
        model.named_parameters(), weight_decay=job.weight_decay, policy=policy, seed=seed, **chosen.roundings
    )
    training = text.read(text.TRAINING)
    for step in range(job.steps):
        optimizer.param_groups[0]["lr"] = job.peak_lr * job.lr_factor(step)
        model(text.batch(training, context, job.batch, seed=seed, step=step, rank=0, world=1)).backward()
        torch_ext.clip_grad_norm_(optimizer, job.max_norm)
        optimizer.step()
        optimizer.zero_grad()
    windows = text.held_out(context, job.held_out)
    with torch.no_grad():
        total = sum(model(chunk).double() * len(chunk) for chunk in windows.split(100))
    return float(total) / len(windows)


def table(losses: dict[tuple[int, int], float]) -> str:
    """Markdown, one row a run."""
    rows = [["configuration", "seed", "held-out loss, nats/byte", "- fp32 of the same seed"]]
    for (index, seed), loss in losses.items():
        beside = "" if index == 0 else f"{loss - losses[0, seed]:+.4f}"
        rows.append([CONFIGURATIONS[index].name, str(seed), f"{loss:.4f}", beside])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * w if i == 0 else "-" * (w - 1) + ":" for i, w in enumerate(widths)])
    align = [str.ljust, *[str.rjust] * 3]
    cells = [[side(cell, w) for side, cell, w in zip(align, row, widths, strict=True)] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model, a few steps")
    job = QUICK if parser.parse_args().quick else FULL

    started = time.perf_counter()
    runs = [(i, seed) for i, configuration in enumerate(CONFIGURATIONS) for seed in configuration.seeds]
    arguments = [*zip(*runs, strict=True), [job] * len(runs)]
    if job is QUICK:  # a process takes longer to start than a run
        losses = dict(zip(runs, map(train, *arguments), strict=True))
    else:  # fresh processes: a fork of one in which torch has threads may hang
        with ProcessPoolExecutor(len(os.sched_getaffinity(0)), multiprocessing.get_context("spawn")) as pool:
            losses = dict(zip(runs, tqdm(pool.map(train, *arguments), "runs", len(runs)), strict=True))

    config, fp32 = job.config, [losses[0, seed] for seed in CONFIGURATIONS[0].seeds]
    parameters = sum(p.numel() for p in GPT(config).parameters())
    print(
        f"\nByte-level GPT, {parameters:,} parameters, {job.steps} steps of {job.batch} x {config.context} bytes of "
        f"the standard library (text {text.fingerprint()}), beta2 = 0.999; mean over {job.held_out * config.context:,} "
        f"held-out bytes. {time.perf_counter() - started:.0f} s.\n{table(losses)}\n"
        f"{len(fp32)} seeds of fp32 are up to {max(fp32) - min(fp32):.4f} apart."
    )
    if not all(map(math.isfinite, losses.values())):
        raise SystemExit("a run ended with a loss that is not finite")


if __name__ == "__main__":
    main()
