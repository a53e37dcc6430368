"""Trains a small language model on one or several processes: a whole program to copy from.

Model, data and loop are plain PyTorch. `main` calls what is torch_ext's: `load_policy`, `parallelize` and `AdamW`.

    torchrun --nproc-per-node 2 examples/07_torchrun.py --strategy optim --steps 60 --checkpoint checkpoint
    python examples/07_torchrun.py

With --checkpoint the run resumes from the checkpoint in that folder, if there is one, and saves there at its end. A run
of 30 steps that is resumed with --steps 60 ends with the weights of a run of 60, if torch's kernels are deterministic.
"""

import argparse
import os
import pathlib
import sys
import zlib
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy, embedding, linear, scaled_dot_product_attention
from torch.optim.lr_scheduler import LambdaLR

sys.path.insert(0, str(pathlib.Path(__file__).absolute().parents[1]))  # not needed if torch_ext is installed
import torch_ext

VOCABULARY, LENGTH, WIDTH, HEADS, BATCH, MICRO_BATCHES, LR, WARM_UP = 64, 32, 64, 4, 16, 2, 3e-3, 10


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Parameter(0.02 * torch.randn(VOCABULARY, WIDTH))  # the embedding, and the head: tied weights
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.blocks, self.norm = nn.Sequential(Block(), Block()), nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return linear(self.norm(self.blocks(embedding(tokens, self.words) + self.positions)), self.words)


def loss_of(model: nn.Module, index: int, device: torch.device) -> Tensor:
    """Returns the loss on batch `index`. Each sequence counts in steps of 1 to 4: the model must find out which."""
    rng = torch.Generator().manual_seed(index)
    start, stride = torch.randint(VOCABULARY, (2, BATCH, 1), generator=rng)
    tokens = ((start + (1 + stride % 4) * torch.arange(LENGTH + 1)) % VOCABULARY).to(device)
    return cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: nn.Module, device: torch.device) -> float:
    """Returns the loss on held-out data: the mean over the ranks, each with a batch of its own."""
    model.eval()
    loss = loss_of(model, 1_000_000_000 + dist.get_rank(), device)
    model.train()
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def train_step(model: Any, optimizer: torch.optim.Optimizer, step: int, device: torch.device) -> None:
    for i in range(MICRO_BATCHES):
        # Batches are numbered over steps and ranks: no batch is used twice, and resuming needs only the step.
        index = (step * MICRO_BATCHES + i) * dist.get_world_size() + dist.get_rank()
        # The last backward of a step exchanges the gradients (under optim_grads and optim_grads_params each does).
        with model.sync() if i == MICRO_BATCHES - 1 else model.no_sync():
            (loss_of(model, index, device) / MICRO_BATCHES).backward()
    torch_ext.clip_grad_norm_(optimizer, 1.0)
    optimizer.step()
    optimizer.zero_grad()


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: LambdaLR) -> dict[str, Any]:
    weights, states = get_state_dict(model, optimizer)  # this rank's part of whatever the strategy splits
    return {"model": weights, "optimizer": states, "scheduler": scheduler}


def report(losses: str, model: Any, optimizer: torch_ext.AdamW) -> None:
    """Prints the losses, what rank 0 holds and sends, and a checksum of the weights. Every rank calls it."""
    held = sum(optimizer.state_bytes().values())
    checksum = 0
    for weight in model.state_dict().values():
        whole = weight.full_tensor() if isinstance(weight, DTensor) else weight  # gathers what FSDP2 splits
        checksum = zlib.crc32(whole.cpu().view(torch.uint8).numpy().tobytes(), checksum)
    if dist.get_rank() == 0:
        print(f"{losses}\nbytes: {held} of optimizer state, {model.wire_bytes()} sent in the last step")
        print(f"checksum of the weights: {checksum:08x}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="optim", help="no_shard, optim, optim_grads or optim_grads_params")
    parser.add_argument("--states", help="bf16 (the default), bf16_remainder, 8bit or fp32")
    parser.add_argument("--steps", type=int, default=60, help="with those of the checkpoint")
    parser.add_argument("--checkpoint", metavar="FOLDER", default="")
    args = parser.parse_args()
    device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "RANK" in os.environ:  # set by torchrun
        dist.init_process_group()  # gloo between CPUs, NCCL between GPUs
    else:
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)

    torch.manual_seed(0)
    model = LanguageModel().bfloat16().to(device)
    policy = torch_ext.load_policy(model)
    torch_ext.parallelize(model, policy, strategy=args.strategy)  # copies rank 0's weights to the others
    named = list(model.named_parameters())  # after parallelize: optim_grads_params (FSDP2) replaces the parameters
    decayed = {"params": [(name, p) for name, p in named if p.ndim > 1], "weight_decay": 0.1}
    others = {"params": [(name, p) for name, p in named if p.ndim <= 1], "weight_decay": 0.0}  # norms and biases
    optimizer = torch_ext.AdamW([decayed, others], lr=LR, policy=policy, states=args.states)
    # Independent of --steps, so that a run can be resumed for longer.
    scheduler = LambdaLR(optimizer, lambda step: min((step + 1) / WARM_UP, (WARM_UP / (step + 1)) ** 0.5))
    if args.checkpoint and pathlib.Path(args.checkpoint, ".metadata").exists():
        state = training_state(model, optimizer, scheduler)
        dcp.load(state, storage_reader=torch_ext.CheckpointReader(args.checkpoint))  # loads the scheduler, too
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    first, before = scheduler.last_epoch, evaluate(model, device)
    for step in range(first, args.steps):
        train_step(model, optimizer, step, device)
        scheduler.step()
    losses = f"held-out loss {before:.3f} -> {evaluate(model, device):.3f}"
    report(f"{args.strategy}, steps {first} to {scheduler.last_epoch}: {losses}", model, optimizer)
    if args.checkpoint:
        state = training_state(model, optimizer, scheduler)
        dcp.save(state, storage_writer=torch_ext.CheckpointWriter(args.checkpoint))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
