"""Trains the byte-level GPT in two or more processes, by one of three recipes that differ in `prepare` alone:

    ours         bf16 model: torch_ext's buckets, clipping and AdamW
    torch-fp32   fp32 model: DistributedDataParallel, torch.nn.utils.clip_grad_norm_, torch.optim.AdamW
    torch-bf16   bf16 model: the same

    torchrun --standalone --nproc-per-node 2 examples/gpt/train.py ours:0 --until middle
    torchrun --standalone --nproc-per-node 2 examples/gpt/train.py --resume ours:0 torch-fp32:0 torch-bf16:0

One argument is one run, recipe:seed; a seed fixes the initial weights and every batch, so runs of one seed see the
same text in the same order. Each run writes OUT/<recipe>-<seed>.jsonl, which report.py reads, and a checkpoint in its
middle.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).absolute().parents[2]))  # the repository's root; not needed where it is installed
import measure
import text
from model import GPT, Config

import torch_ext


@dataclass(frozen=True)
class Job:
    """Sizes of the main job. One step reads `world * batch * context` bytes."""

    config: Config
    batch: int
    steps: int
    warmup: int
    peak_lr: float
    held_out: int  # sequences of `context` bytes
    validate_every: int
    weight_decay: float = 0.1
    max_norm: float = 1.0
    least_lr_factor: float = 0.1

    def lr_factor(self, step: int) -> float:
        """Linear warm-up, then a cosine down to `least_lr_factor`."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        least = self.least_lr_factor
        return least + (1 - least) / 2 * (1 + math.cos(math.pi * min(1.0, done)))


FULL = Job(
    Config(layers=3, heads=4, width=256, context=128),
    batch=8,
    steps=200,
    warmup=40,
    peak_lr=1e-3,
    held_out=1600,
    validate_every=20,
)
QUICK = Job(
    Config(layers=2, heads=2, width=64, context=64),
    batch=4,
    steps=20,
    warmup=4,
    peak_lr=2e-3,
    held_out=50,
    validate_every=5,
)


def prepare(recipe: str, model: GPT, job: Job) -> tuple[nn.Module, Optimizer, Callable[[], Tensor]]:
    """The model to call, its optimizer, and the function that clips the gradients and returns their norm."""
    hyper = {"lr": job.peak_lr, "weight_decay": job.weight_decay}
    if recipe == "ours":
        policy = torch_ext.load_policy(model)
        torch_ext.parallelize(model, policy)
        ours = torch_ext.AdamW(model.named_parameters(), policy=policy, **hyper)
        return model, ours, lambda: torch_ext.clip_grad_norm_(ours, job.max_norm)

    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    stock = torch.optim.AdamW(model.parameters(), fused=True, **hyper)
    return ddp, stock, lambda: nn.utils.clip_grad_norm_(model.parameters(), job.max_norm)


@torch.no_grad()
def validation_loss(model: GPT, windows: Tensor) -> float:
    """Mean nats per byte over all windows, which the ranks share."""
    total = torch.zeros(1, dtype=torch.float64)
    for chunk in windows[dist.get_rank() :: dist.get_world_size()].split(16):
        total += model(chunk).double() * len(chunk)
    dist.all_reduce(total)
    return total.item() / len(windows)


class Log:
    """OUT/<run>.jsonl, one record a line, written by rank 0."""

    def __init__(self, path: Path, resume: bool) -> None:
        self._file = open(path, "a" if resume else "w") if dist.get_rank() == 0 else None

    def write(self, **record: object) -> None:
        if self._file:
            print(json.dumps(record), file=self._file, flush=True)

    def close(self) -> None:
        if self._file:
            self._file.close()


def train(recipe: str, seed: int, job: Job, out: Path, until: int, resume: bool) -> None:
    rank, world, context = dist.get_rank(), dist.get_world_size(), job.config.context
    torch.manual_seed(seed)
    model = GPT(job.config).to(torch.float32 if recipe == "torch-fp32" else torch.bfloat16)
    module, optimizer, clip = prepare(recipe, model, job)
    schedule = LambdaLR(optimizer, job.lr_factor)

    checkpoint = out / f"{recipe}-{seed}.pt"
    first = 0
    if resume:
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        first = saved["step"]

    training, windows = text.read(text.TRAINING), text.held_out(context, job.held_out)
    log = Log(out / f"{recipe}-{seed}.jsonl", resume)
    step_seconds, update_seconds = [], []
    sent_before = measure.bytes_sent()
    sizes: dict[str, int] = {}
    bar = tqdm(range(first, until), initial=first, total=job.steps, desc=f"{recipe} seed {seed}", disable=rank != 0)
    for step in bar:
        started = time.perf_counter()
        batch = text.batch(training, context, job.batch, seed=seed, step=step, rank=rank, world=world)
        loss = module(batch)
        loss.backward()
        computed = time.perf_counter()
        norm = clip()
        optimizer.step()
        update_seconds.append(time.perf_counter() - computed)
        if step + 1 == until:
            sizes = measure.resident_bytes(optimizer)
        optimizer.zero_grad()
        schedule.step()
        step_seconds.append(time.perf_counter() - started)

        log.write(step=step + 1, loss=loss.item(), norm=float(norm))
        if (step + 1) % job.validate_every == 0 and step + 1 < job.steps:
            value = validation_loss(model, windows[: job.held_out // 10])
            log.write(step=step + 1, preview=value)
            bar.set_postfix(train=f"{loss.item():.3f}", held_out=f"{value:.3f}")
        if step + 1 == job.steps // 2 and rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "schedule": schedule.state_dict(), "step": step + 1}, checkpoint)

    sent = measure.bytes_sent()
    log.write(
        step=until,
        step_ms=1e3 * statistics.median(step_seconds),
        update_ms=1e3 * statistics.median(update_seconds),
        sent=None if sent is None or sent_before is None else (sent - sent_before) / (until - first),
        parameters=measure.parameter_count(model),
        sizes=sizes,
        world=world,
        first=first,
    )
    if until == job.steps:
        log.write(step=until, validation=validation_loss(model, windows), held_out_bytes=windows.shape[0] * context)
    log.close()
    dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", metavar="recipe:seed", help="from its beginning")
    parser.add_argument("--resume", action="append", default=[], metavar="recipe:seed", help="from its middle on")
    parser.add_argument("--until", choices=("middle", "end"), default="end")
    parser.add_argument("--quick", action="store_true", help="a tiny model, a few steps")
    parser.add_argument("--out", type=Path, default=Path("out"))
    args = parser.parse_args()

    job = QUICK if args.quick else FULL
    until = job.steps // 2 if args.until == "middle" else job.steps
    args.out.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo")
    for run in [*args.resume, *args.runs]:
        recipe, _, seed = run.partition(":")
        train(recipe, int(seed), job, args.out, until, resume=run in args.resume)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
