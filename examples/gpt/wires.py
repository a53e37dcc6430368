"""The loss of the byte-level GPT by what its gradients travel in: fp32, bf16, or 8 bits, which nobody else offers.

    python examples/gpt/wires.py            # minutes on two cores
    python examples/gpt/wires.py --quick    # seconds: every wire, no claims

Two processes train the bf16 model of configurations.py with torch_ext's buckets; the runs of one seed begin with the
same weights and read the same text in the same order. Three seeds of the fp32 wire say how far apart two runs may end
without meaning anything. Ends with a table and with OUT_DIR/wires.png (OUT_DIR: out).
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import matplotlib
import torch
import torch.distributed as dist

matplotlib.use("Agg")  # a file, no display
import matplotlib.pyplot as plt

sys.path.insert(0, str(Path(__file__).absolute().parents[2]))  # the repository's root; not needed where it is installed
import configurations
import text
from model import GPT
from report import smooth
from train import Job, validation_loss

import torch_ext

WORLD = 2
FULL = replace(configurations.FULL, batch=4, steps=1200, validate_every=1200)
QUICK = replace(configurations.QUICK, batch=2)


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


def train(run: Run, job: Job) -> Result:
    rank, context = dist.get_rank(), job.config.context
    torch.manual_seed(run.seed)
    model = GPT(job.config).bfloat16()
    policy = torch_ext.load_policy(
        model, override_optimizer_config={"main_grads_dtype": "fp32"}, override_ddp_config=run.wire
    )
    torch_ext.parallelize(model, policy, strategy=run.strategy)
    optimizer = torch_ext.AdamW(model.named_parameters(), weight_decay=job.weight_decay, policy=policy, seed=run.seed)
    training, losses = text.read(text.TRAINING), []
    for step in range(job.steps):
        optimizer.param_groups[0]["lr"] = job.peak_lr * job.lr_factor(step)
        batch = text.batch(training, context, job.batch, seed=run.seed, step=step, rank=rank, world=WORLD)
        loss = model(batch)
        loss.backward()
        torch_ext.clip_grad_norm_(optimizer, job.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    mean = torch.stack(losses).double()
    dist.all_reduce(mean)
    numel = sum(p.numel() for p in model.parameters())
    held_out = validation_loss(model, text.held_out(context, job.held_out))
    return Result(run, (mean / WORLD).tolist(), held_out, model.wire_bytes() / numel)


def rank_main(rank: int, store: str, job: Job, results: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    found = [train(run, job) for run in RUNS]
    if rank == 0:
        torch.save(found, results)
    dist.destroy_process_group()


def table(results: list[Result]) -> str:
    rows = [["gradients", "seed", "bytes sent per parameter and step", "held-out loss, nats/byte", "- fp32 wire"]]
    fp32 = {r.run.seed: r.held_out for r in results if r.run.name == RUNS[0].name}
    for r in results:
        beside = "" if r.run.name == RUNS[0].name else f"{r.held_out - fp32[r.run.seed]:+.4f}"
        rows.append([r.run.name, str(r.run.seed), f"{r.bytes_sent:.2f}", f"{r.held_out:.4f}", beside])
    rows.insert(1, ["---", *["---:"] * 4])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


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
    job = QUICK if parser.parse_args().quick else FULL
    out = Path(os.environ.get("OUT_DIR") or "out")
    out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # both processes are here
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        results_file = os.path.join(folder, "results.pt")
        torch.multiprocessing.spawn(rank_main, (os.path.join(folder, "store"), job, results_file), nprocs=WORLD)
        results: list[Result] = torch.load(results_file, weights_only=False)
    draw(results, out / "wires.png")
    fp32 = [r.held_out for r in results if r.run.name == RUNS[0].name]
    print(
        f"Byte-level GPT, {sum(p.numel() for p in GPT(job.config).parameters()):,} parameters, {job.steps} steps of "
        f"{WORLD} x {job.batch} x {job.config.context} bytes of the standard library (text {text.fingerprint()}). "
        f"{time.perf_counter() - started:.0f} s.\n{table(results)}\n"
        f"{len(fp32)} seeds of the fp32 wire are up to {max(fp32) - min(fp32):.4f} apart. Curves: {out / 'wires.png'}"
    )
    if not all(math.isfinite(r.held_out) for r in results):
        raise SystemExit("a run ended with a loss that is not finite")


if __name__ == "__main__":
    main()
