"""Compares the loss of the byte-level GPT when its gradients are sent in fp32, in bf16 and in 8 bits.

    python examples/gpt/wires.py            # minutes on two cores
    python examples/gpt/wires.py --quick    # seconds: every wire, no claims

Two processes train a small bf16 model with torch_ext's buckets. The runs of one seed start from the same weights and
read the same text in the same order. Three seeds of the fp32 wire show how much runs differ by chance. Prints a table
and writes OUT_DIR/wires.png (OUT_DIR: out).
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import matplotlib
import torch
import torch.distributed as dist

matplotlib.use("Agg")  # a file, no display
import matplotlib.pyplot as plt

sys.path.insert(0, str(Path(__file__).absolute().parents[2]))  # the repository's root; not needed where it is installed
import text
from configurations import Training
from model import GPT, Config
from stages import Stage, held_out_loss, train_steps
from tables import markdown
from tqdm import tqdm

import torch_ext

WORLD = 2
# The learning rate falls to a hundredth, because rounding shows when updates are small.
FULL = Stage(
    Config(layers=2, heads=2, width=64, context=64),
    "code",
    batch=4,
    steps=1200,
    warmup=100,
    peak_lr=3e-3,
    held_out=2000,
    least_lr_factor=0.01,
)
QUICK = replace(FULL, config=Config(layers=1, heads=2, width=32, context=32), batch=2, steps=20, warmup=4, held_out=50)


@dataclass(frozen=True)
class Run:
    name: str
    strategy: str
    wire: dict[str, str]  # override_ddp_config
    seed: int = 0


RUNS = [
    *(Run("fp32 wire", "no_shard", {"grad_comm_dtype": "fp32"}, seed) for seed in range(3)),
    Run("bf16 wire", "no_shard", {"grad_comm_dtype": "bf16"}),
    Run("8-bit wire, sums gathered in bf16", "no_shard", {"grad_comm_dtype": "fp8"}),
    Run("8-bit wire, sums gathered in 8 bits", "no_shard", {"grad_comm_dtype": "fp8", "grad_gather_dtype": "fp8"}),
    Run("8-bit wire, sharded optimizer", "optim", {"grad_comm_dtype": "fp8"}),
]


@dataclass(frozen=True)
class Result:
    run: Run
    losses: list[float]  # training, by step
    held_out: float  # nats per byte
    bytes_sent: float  # per parameter and step, by rank 0


def train(run: Run, stage: Stage) -> Result:
    rank = dist.get_rank()
    torch.manual_seed(run.seed)
    model = GPT(stage.config).bfloat16()
    policy = torch_ext.load_policy(
        model, override_optimizer_config={"main_grads_dtype": "fp32"}, override_ddp_config=run.wire
    )
    torch_ext.parallelize(model, policy, strategy=run.strategy)
    optimizer = torch_ext.AdamW(model.named_parameters(), weight_decay=stage.weight_decay, policy=policy, seed=run.seed)
    training = Training(model, optimizer, partial(torch_ext.clip_grad_norm_, optimizer))
    steps = train_steps(stage, training, run.seed, range(stage.steps), rank, WORLD)
    shown = tqdm(steps, f"{run.name}, seed {run.seed}", stage.steps, mininterval=1, disable=rank != 0)
    mean = torch.stack([loss for _, loss, _ in shown]).double()
    dist.all_reduce(mean)
    numel = sum(p.numel() for p in model.parameters())
    windows = text.held_out(stage.corpus, stage.config.context, stage.held_out)
    held_out = held_out_loss(model, windows, rank, WORLD)
    return Result(run, (mean / WORLD).tolist(), held_out, model.wire_bytes() / numel)


def rank_main(rank: int, store: str, stage: Stage, results: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    found = [train(run, stage) for run in RUNS]
    if rank == 0:
        torch.save(found, results)
    dist.destroy_process_group()


def table(results: list[Result]) -> str:
    rows = [["gradients", "seed", "bytes sent per parameter and step", "held-out loss, nats/byte", "- fp32 wire"]]
    fp32 = {r.run.seed: r.held_out for r in results if r.run.name == RUNS[0].name}
    for r in results:
        difference = "" if r.run.name == RUNS[0].name else f"{r.held_out - fp32[r.run.seed]:+.4f}"
        rows.append([r.run.name, str(r.run.seed), f"{r.bytes_sent:.2f}", f"{r.held_out:.4f}", difference])
    return markdown(rows)


def smooth(values: list[float], keep: float = 0.9) -> list[float]:
    """Returns the exponential moving average, corrected for the bias of its start."""
    mean, out = 0.0, []
    for i, value in enumerate(values):
        mean = keep * mean + (1 - keep) * value
        out.append(mean / (1 - keep ** (i + 1)))
    return out


def draw(results: list[Result], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(8, 5))
    seen: set[str] = set()
    for r in results:
        label = r.run.name if r.run.name not in seen else None
        seen.add(r.run.name)
        axes.plot(smooth(r.losses), label=label, linewidth=1, color="0.6" if r.run.name == RUNS[0].name else None)
    axes.set_xlabel("step")
    axes.set_ylabel("training loss, nats/byte")
    axes.set_ylim(top=min(4.0, max(results[0].losses)))
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model, a few steps")
    stage = QUICK if parser.parse_args().quick else FULL
    out = Path(os.environ.get("OUT_DIR") or "out")
    out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # both processes are on this machine
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        results_file = os.path.join(folder, "results.pt")
        torch.multiprocessing.spawn(rank_main, (os.path.join(folder, "store"), stage, results_file), nprocs=WORLD)
        results: list[Result] = torch.load(results_file, weights_only=False)
    draw(results, out / "wires.png")
    fp32 = [r.held_out for r in results if r.run.name == RUNS[0].name]
    parameters = sum(p.numel() for p in GPT(stage.config).parameters())
    print(
        f"Byte-level GPT, {parameters:,} parameters, {stage.steps} steps of "
        f"{WORLD} x {stage.batch} x {stage.config.context} bytes of the standard library (text {text.fingerprint()}). "
        f"{time.perf_counter() - started:.0f} s.\n{table(results)}\n"
        f"{len(fp32)} seeds of the fp32 wire are up to {max(fp32) - min(fp32):.4f} apart. Curves: {out / 'wires.png'}"
    )
    if not all(math.isfinite(r.held_out) for r in results):
        raise SystemExit("a run ended with a loss that is not finite")


if __name__ == "__main__":
    main()
