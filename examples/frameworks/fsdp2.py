"""A loop in torchtitan's style: FSDP2 around each block, mixed precision, DCP. Two lines create the optimizer.

The shards are fp32 and the blocks compute in bf16, so the shards are their own master weights; moments are bf16,
dithered. States are DTensors like the parameters: torch's clip_grad_norm_ and torch.distributed.checkpoint work, and a
checkpoint may be loaded on another number of ranks.

    python examples/frameworks/fsdp2.py
"""

import os
import pathlib
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

sys.path.insert(
    0, str(pathlib.Path(__file__).absolute().parents[2])
)  # the repository's root; not needed when installed
import torch_ext

WORLD, STEPS = 2, 20


def network() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(2)]
    model = nn.Sequential(nn.Linear(16, 64), *blocks, nn.Linear(64, 1))
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in blocks:
        fully_shard(block, mp_policy=mixed)
    return fully_shard(model, mp_policy=mixed)


def train(folder: str, resume: bool) -> nn.Module:
    model = network()
    policy = torch_ext.load_policy(model)  # reads that the blocks compute in bf16: bf16 moments
    optimizer = torch_ext.AdamW(
        model.named_parameters(), lr=1e-3, policy=policy
    )  # was: torch.optim.AdamW(model.parameters(), lr=1e-3)
    if resume:
        parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(parts, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"])
    for step in range(STEPS // 2 if resume else 0, STEPS):
        x = torch.randn(64, 16, generator=torch.Generator().manual_seed(WORLD * step + dist.get_rank()))
        loss = nn.functional.mse_loss(model(x)[:, 0].float(), x.abs().sum(1))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 10.0).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 == STEPS // 2 and not resume:
            parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            dcp.save(parts, checkpoint_id=folder)
    assert all(state["exp_avg"].dtype == torch.bfloat16 for state in optimizer.state.values())
    if dist.get_rank() == 0:
        print(f"step {step} loss {loss.item():.3f} norm {norm.item():.3f}")
    return model


def rank_main(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    whole = train(f"{folder}/checkpoint", resume=False)
    resumed = train(f"{folder}/checkpoint", resume=True)
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a.to_local(), b.to_local()), "a resumed run no longer has the bits of the other"
    dist.destroy_process_group()


def main() -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # both processes are on this machine
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_main, (folder,), nprocs=WORLD)


if __name__ == "__main__":
    main()
