"""Data parallelism with one line, under each strategy, and a checkpoint that moves between strategies.

Two processes train one bf16 model in an ordinary loop. The strategies differ in what each process holds. A checkpoint
is gathered from all ranks and is what a single process would have written. The second half of each run resumes from the
checkpoint of another strategy, and all runs end with the same weights.

    python examples/03_strategies.py
"""

import os
import pathlib
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from tqdm import tqdm

sys.path.insert(
    0, str(pathlib.Path(__file__).absolute().parents[1])
)  # the repository's root; not needed when installed
import torch_ext

WORLD, STEPS = 2, 20
STRATEGIES = ("no_shard", "optim", "optim_grads")


def network() -> nn.Module:
    torch.manual_seed(0)
    hidden = [nn.Linear(16, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU()]
    return nn.Sequential(*hidden, nn.Linear(256, 1)).bfloat16()


def train(strategy: str, steps: range, saved: dict[str, object] | None) -> dict[str, object]:
    """Trains `steps`, resuming from `saved` if it is given; returns a checkpoint."""
    model = network()
    # Gradients are sent and accumulated in fp32 here, so that no_shard gives the bits of the other strategies.
    policy = torch_ext.load_policy(model, override_ddp_config={"grad_reduce_in_fp32": True})
    torch_ext.parallelize(model, policy, strategy=strategy)  # the one line
    optimizer = torch_ext.AdamW(model.named_parameters(), lr=1e-3, policy=policy)
    if saved is not None:
        model.load_state_dict(saved["model"])  # type: ignore[arg-type]
        optimizer.load_state_dict(saved["optimizer"])  # type: ignore[arg-type]
    for step in tqdm(steps, strategy, disable=dist.get_rank() != 0):
        x = torch.randn(64, 16, generator=torch.Generator().manual_seed(WORLD * step + dist.get_rank()))
        loss = nn.functional.mse_loss(model(x.bfloat16())[:, 0].float(), x.abs().sum(1))
        loss.backward()
        torch_ext.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        held = sum(optimizer.state_bytes().values())
        numel = sum(p.numel() for p in model.parameters())
        print(
            f"{strategy:12} loss {loss.item():.4f}, {held / numel:5.2f} bytes of optimizer state per parameter and rank"
        )
    return {"model": model.state_dict(), "optimizer": optimizer.consolidate_state_dict(to=None)}


def rank_main(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    middles = [train(strategy, range(STEPS), None) for strategy in STRATEGIES]
    ends = [train(strategy, range(STEPS, 2 * STEPS), middles[i - 1]) for i, strategy in enumerate(STRATEGIES)]
    for end in ends[1:]:
        for a, b in zip(ends[0]["model"].values(), end["model"].values(), strict=True):  # type: ignore[attr-defined]
            assert torch.equal(a, b), "strategies no longer have the same bits"
    dist.destroy_process_group()


def main() -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # both processes are on this machine
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_main, (os.path.join(folder, "store"),), nprocs=WORLD)


if __name__ == "__main__":
    main()
